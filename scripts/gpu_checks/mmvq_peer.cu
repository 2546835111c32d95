// llama.cpp's product of a quantized matrix with a vector, for mmvq.py: its source is found in a checkout when this is
// compiled. What its other files define and a product needs is defined here.

#include "mmvq.cu"

#include <cstdlib>
#include <cstring>

static ggml_type own_type;
static int64_t own_block;

const ggml_cuda_device_info & ggml_cuda_info() {
    static ggml_cuda_device_info found = [] {
        ggml_cuda_device_info info = {};
        cudaDeviceProp of;
        cudaGetDeviceProperties(&of, 0);
        info.device_count = 1;
        info.devices[0].cc = 100 * of.major + 10 * of.minor;
        info.devices[0].nsm = of.multiProcessorCount;
        info.devices[0].smpb = of.sharedMemPerBlock;
        info.devices[0].smpbo = of.sharedMemPerBlockOptin;
        info.devices[0].warp_size = of.warpSize;
        return info;
    }();
    return found;
}

int ggml_cuda_get_device() { return 0; }

void ggml_cuda_error(const char *, const char *, const char *, int, const char * said) {
    fprintf(stderr, "CUDA: %s\n", said);
    std::abort();
}

extern "C" int64_t ggml_blck_size(enum ggml_type) { return own_block; }

// y f32 [rows] = weights [rows, columns], blocks of a GGUF, times x, blocks of q8_1 [padded / 32]; queued on a stream
extern "C" __attribute__((visibility("default"))) void multiply(
    int type, int64_t block, int64_t rows, int64_t columns, int64_t padded, const char * weights, const char * x, float * y,
    void * stream) {
    own_type = (ggml_type) type;
    own_block = block;
    ggml_tensor matrix, given, result;
    std::memset(&matrix, 0, sizeof matrix);
    std::memset(&given, 0, sizeof given);
    std::memset(&result, 0, sizeof result);
    matrix.type = own_type;
    matrix.ne[0] = given.ne[0] = columns;
    matrix.ne[1] = result.ne[0] = rows;
    // only its device is read, and it must not be destroyed
    static auto * context = (ggml_backend_cuda_context *) std::calloc(1, sizeof(ggml_backend_cuda_context));
    ggml_cuda_op_mul_mat_vec_q(
        *context, &matrix, &given, &result, weights, nullptr, x, y, 0, rows, 1, padded, (cudaStream_t) stream);
}
