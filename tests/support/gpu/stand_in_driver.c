/* A stand-in for NVIDIA's driver library: one H100 on which memory and copies work and kernels do nothing.

   With it numba-cuda, cuda.core and Triton run to their ends on a machine without a GPU, and, with stand_in_runtime.c,
   PyTorch's CUDA build. Only results are wrong: what kernels would have written stays as it was. Device memory is the
   host's, reserved but not occupied before it is touched. Everything is done at once, so streams are always idle and
   events have always passed; only captures are kept, and replayed: their copies and fills happen then.

   Like the real driver it refuses launches beyond the device's limits, kernels that a cubin does not contain, unknown
   handles, calls without a context, and calls that a capture forbids. It knows CUDA 13 on 64-bit Linux; a function that
   nobody has needed answers CUDA_ERROR_NOT_SUPPORTED.

   stand_in.py compiles it. STAND_IN_LOG=1 lists all calls on stderr, and with the launch of a kernel that was loaded as
   a cubin its arguments, in hexadecimal:

     stand-in: launch NAME grid 1 1 1 block 64 1 1 shared 0 stream (nil) attribute 6=1 arguments 7f06ac000000 1000 */

#define _GNU_SOURCE
#include <cuda.h>
#include <dlfcn.h>
#include <elf.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

enum {
    VERSION = 13000,
    MULTIPROCESSORS = 132,
    WARP = 32,
    THREADS_OF_BLOCK = 1024,
    THREADS_OF_MULTIPROCESSOR = 2048,
    BLOCKS_OF_MULTIPROCESSOR = 32,
    REGISTERS = 65536,             /* of a block, and of a multiprocessor */
    SHARED = 49152,                /* bytes of a block, without asking */
    SHARED_ON_REQUEST = 232448,    /* bytes of a block at most */
    SHARED_OF_MULTIPROCESSOR = 233472,
    SHARED_OF_SYSTEM = 1024,       /* bytes that each block takes more */
    L2 = 50 << 20,
};
static const size_t MEMORY = 79ul << 30, USED_BY_CONTEXT = 512ul << 20, ALLOCATION_UNIT = 2ul << 20; /* bytes */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* ---- the log ---- */

static bool logs(void) {
    static int wanted = -1;
    if (wanted < 0) {
        const char *value = getenv("STAND_IN_LOG");
        wanted = value && *value && strcmp(value, "0");
    }
    return wanted;
}

static void say(const char *format, ...) {
    char line[4096];
    va_list values;
    va_start(values, format);
    vsnprintf(line, sizeof line, format, values);
    va_end(values);
    fprintf(stderr, "stand-in: %s\n", line); /* whole lines, as threads share stderr */
}

#define CALLED(...) (logs() ? say(__VA_ARGS__) : (void)0)
#define CALL CALLED("%s", __func__)

/* ---- the device ---- */

CUresult cuInit(unsigned flags) { CALL; return flags ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) { CALL; *version = VERSION; return CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *count) { CALL; *count = 1; return CUDA_SUCCESS; }
CUresult cuDeviceTotalMem(size_t *bytes, CUdevice device) { CALL; *bytes = MEMORY; return CUDA_SUCCESS; }

CUresult cuDeviceGet(CUdevice *device, int number) {
    CALL;
    *device = 0;
    return number ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char *name, int length, CUdevice device) {
    CALL;
    snprintf(name, length, "NVIDIA H100 80GB HBM3");
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device) {
    CALL;
    memcpy(uuid->bytes, "stand-in for GPU", 16);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetPCIBusId(char *id, int length, CUdevice device) {
    CALL;
    snprintf(id, length, "0000:01:00.0");
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    CALLED("%s %d", __func__, attribute);
    switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = 9; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = MULTIPROCESSORS; break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = WARP; break;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y: *value = THREADS_OF_BLOCK; break;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z: *value = 64; break;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X: case CU_DEVICE_ATTRIBUTE_MAX_PITCH: *value = INT32_MAX; break;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y: case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z: *value = 65535; break;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: *value = THREADS_OF_MULTIPROCESSOR; break;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR: *value = BLOCKS_OF_MULTIPROCESSOR; break;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR:
        *value = REGISTERS; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: *value = SHARED; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = SHARED_ON_REQUEST; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *value = SHARED_OF_MULTIPROCESSOR; break;
    case CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK: *value = SHARED_OF_SYSTEM; break;
    case CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY: *value = 65536; break;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: *value = L2; break;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: *value = 1980000; break;        /* kHz */
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: *value = 2619000; break; /* kHz */
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: *value = 5120; break;
    case CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT: *value = 512; break;
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID: case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY: case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS:
    case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED: case CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH:
    case CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH: *value = 1; break;
    default: *value = 0;
    }
    return device ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char **name) {
    static __thread char text[64];
    *name = text;
    switch (error) {
#define NAME(e) case e: *name = #e; break;
        NAME(CUDA_SUCCESS) NAME(CUDA_ERROR_INVALID_VALUE) NAME(CUDA_ERROR_OUT_OF_MEMORY) NAME(CUDA_ERROR_INVALID_DEVICE)
        NAME(CUDA_ERROR_INVALID_CONTEXT) NAME(CUDA_ERROR_INVALID_HANDLE) NAME(CUDA_ERROR_NOT_FOUND)
        NAME(CUDA_ERROR_NOT_SUPPORTED) NAME(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES) NAME(CUDA_ERROR_CAPTURED_EVENT)
        NAME(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED) NAME(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)
        NAME(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED)
    default: snprintf(text, sizeof text, "CUDA error %d", error);
    }
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text) { return cuGetErrorName(error, text); }

/* ---- contexts: the primary one, and each thread's stack ---- */

struct CUctx_st { int retained; } primary;
static __thread CUcontext current, stack[64];
static __thread int depth;

#define NEEDS_CONTEXT if (!current) return CUDA_ERROR_INVALID_CONTEXT

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    CALL;
    if (device) return CUDA_ERROR_INVALID_DEVICE;
    __atomic_add_fetch(&primary.retained, 1, __ATOMIC_RELAXED);
    *context = &primary;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
    CALL;
    __atomic_sub_fetch(&primary.retained, 1, __ATOMIC_RELAXED);
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    CALL;
    *flags = 0;
    *active = primary.retained > 0;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) { CALL; *context = current; return CUDA_SUCCESS; }

CUresult cuCtxSetCurrent(CUcontext context) {
    CALLED("%s %p", __func__, context);
    if (context && context != &primary) return CUDA_ERROR_INVALID_CONTEXT;
    current = context;
    return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent(CUcontext context) {
    CALLED("%s %p", __func__, context);
    if (context != &primary || depth == 64) return CUDA_ERROR_INVALID_CONTEXT;
    stack[depth++] = current;
    current = context;
    return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent(CUcontext *context) {
    CALL;
    NEEDS_CONTEXT;
    if (context) *context = current;
    current = depth ? stack[--depth] : NULL;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *device) { CALL; NEEDS_CONTEXT; *device = 0; return CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { CALL; *value = 1 << 20; return CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { CALL; return CUDA_SUCCESS; }

CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    CALL;
    *least = 0;
    *greatest = -5;
    return CUDA_SUCCESS;
}

/* ---- streams and what they capture ---- */

typedef struct { /* rows of bytes that are copied, or of elements that are filled with a value */
    char *to;
    const char *from;
    size_t to_pitch, from_pitch, width, height;
    unsigned value, element; /* element: its bytes */
} Rows;

typedef struct CUgraph_st Graph;
typedef struct CUgraphNode_st {
    CUgraphNodeType work;
    Rows rows;
    CUhostFn function;
    void *data;
    CUevent event;
    Graph *child;
} Node;

struct CUgraph_st {
    Node **nodes; /* in the order in which they were added: one after the other is an order in which they can run */
    size_t count;
};

typedef struct {
    Graph *graph;
    cuuint64_t id;
    CUstreamCaptureMode mode;
    bool invalid, ended;
    CUstream origin;
} Capture;

struct CUstream_st {
    unsigned flags;
    int priority;
    unsigned long long id;
    Capture *capture;
    CUstream next;
} legacy = {.id = 0}, per_thread = {.id = 1};

struct CUevent_st {
    unsigned flags;
    struct timespec time;
    bool recorded;
    Capture *capture; /* in which it was recorded */
};

static CUstream streams; /* all but the two above */
static unsigned long long stream_ids = 2, capture_ids = 1;
static int global_captures;                                      /* of all threads */
static __thread int own_captures;                                /* of this thread, that are not relaxed */
static __thread CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

static CUstream known(CUstream handle) {
    if (handle == NULL || handle == CU_STREAM_LEGACY) return &legacy;
    if (handle == CU_STREAM_PER_THREAD) return &per_thread;
    pthread_mutex_lock(&lock);
    CUstream stream = streams;
    while (stream && stream != handle) stream = stream->next;
    pthread_mutex_unlock(&lock);
    return stream;
}

#define STREAM(handle) \
    CUstream stream = known(handle); \
    if (!stream) return CUDA_ERROR_INVALID_HANDLE

/* Whether a capture forbids this thread what may wait for the device: allocations, and synchronous copies. */
static bool forbidden(void) {
    return (mode == CU_STREAM_CAPTURE_MODE_GLOBAL && global_captures) ||
           (mode != CU_STREAM_CAPTURE_MODE_RELAXED && own_captures);
}

#define NEEDS_NO_CAPTURE if (forbidden()) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED

static void append(Graph *graph, Node node) {
    graph->nodes = realloc(graph->nodes, (graph->count + 1) * sizeof *graph->nodes);
    graph->nodes[graph->count] = malloc(sizeof node);
    *graph->nodes[graph->count++] = node;
}

static void run(const Node *node);

/* Do it now, or add it to what the stream captures. */
static CUresult queue(CUstream handle, Node node) {
    NEEDS_CONTEXT;
    STREAM(handle);
    if (stream->capture) append(stream->capture->graph, node);
    else run(&node);
    return CUDA_SUCCESS;
}

CUresult cuStreamCreateWithPriority(CUstream *handle, unsigned flags, int priority) {
    CALL;
    NEEDS_CONTEXT;
    CUstream stream = calloc(1, sizeof *stream);
    pthread_mutex_lock(&lock);
    *stream = (struct CUstream_st){.flags = flags, .priority = priority, .id = stream_ids++, .next = streams};
    streams = stream;
    pthread_mutex_unlock(&lock);
    *handle = stream;
    return CUDA_SUCCESS;
}

CUresult cuStreamCreate(CUstream *handle, unsigned flags) { return cuStreamCreateWithPriority(handle, flags, 0); }

CUresult cuStreamDestroy(CUstream handle) {
    CALL;
    STREAM(handle);
    pthread_mutex_lock(&lock);
    for (CUstream *link = &streams; *link; link = &(*link)->next)
        if (*link == stream) {
            *link = stream->next;
            free(stream);
            break;
        }
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

CUresult cuStreamSynchronize(CUstream handle) {
    CALL;
    STREAM(handle);
    if (stream->capture) stream->capture->invalid = true;
    return stream->capture || forbidden() ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS;
}

CUresult cuStreamQuery(CUstream handle) { return cuStreamSynchronize(handle); }
CUresult cuCtxSynchronize(void) { CALL; NEEDS_CONTEXT; NEEDS_NO_CAPTURE; return CUDA_SUCCESS; }

CUresult cuStreamGetDevice(CUstream handle, CUdevice *device) {
    CALL;
    STREAM(handle);
    *device = 0;
    return CUDA_SUCCESS;
}

CUresult cuStreamGetPriority(CUstream handle, int *priority) {
    CALL;
    STREAM(handle);
    *priority = stream->priority;
    return CUDA_SUCCESS;
}

CUresult cuStreamGetFlags(CUstream handle, unsigned *flags) {
    CALL;
    STREAM(handle);
    *flags = stream->flags;
    return CUDA_SUCCESS;
}

CUresult cuStreamGetId(CUstream handle, unsigned long long *id) {
    CALL;
    STREAM(handle);
    *id = stream->id;
    return CUDA_SUCCESS;
}

CUresult cuStreamGetCtx(CUstream handle, CUcontext *context) {
    CALL;
    STREAM(handle);
    *context = stream == &legacy || stream == &per_thread ? current : &primary;
    return CUDA_SUCCESS;
}

CUresult cuStreamBeginCapture(CUstream handle, CUstreamCaptureMode wanted) {
    CALLED("%s %p, mode %d", __func__, handle, wanted);
    STREAM(handle);
    if (stream == &legacy) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (stream->capture) return CUDA_ERROR_INVALID_VALUE;
    stream->capture = calloc(1, sizeof *stream->capture);
    stream->capture->graph = calloc(1, sizeof(Graph));
    stream->capture->id = __atomic_fetch_add(&capture_ids, 1, __ATOMIC_RELAXED);
    stream->capture->mode = wanted;
    stream->capture->origin = stream;
    if (wanted == CU_STREAM_CAPTURE_MODE_GLOBAL) __atomic_add_fetch(&global_captures, 1, __ATOMIC_RELAXED);
    if (wanted != CU_STREAM_CAPTURE_MODE_RELAXED) own_captures++;
    return CUDA_SUCCESS;
}

CUresult cuStreamEndCapture(CUstream handle, Graph **graph) {
    CALLED("%s %p", __func__, handle);
    STREAM(handle);
    Capture *capture = stream->capture;
    *graph = NULL;
    if (!capture) return CUDA_ERROR_INVALID_VALUE;
    if (capture->origin != stream) return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
    if (capture->mode == CU_STREAM_CAPTURE_MODE_GLOBAL) __atomic_sub_fetch(&global_captures, 1, __ATOMIC_RELAXED);
    if (capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED) own_captures--;
    capture->ended = true; /* it stays, as events refer to it */
    pthread_mutex_lock(&lock);
    for (CUstream other = streams; other; other = other->next) /* those that have joined it too */
        if (other->capture == capture) other->capture = NULL;
    pthread_mutex_unlock(&lock);
    if (capture->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    *graph = capture->graph;
    return CUDA_SUCCESS;
}

static CUstreamCaptureStatus status_of(const Capture *capture) {
    if (!capture) return CU_STREAM_CAPTURE_STATUS_NONE;
    return capture->invalid ? CU_STREAM_CAPTURE_STATUS_INVALIDATED : CU_STREAM_CAPTURE_STATUS_ACTIVE;
}

CUresult cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus *status) {
    CALL;
    STREAM(handle);
    *status = status_of(stream->capture);
    return CUDA_SUCCESS;
}

CUresult cuStreamGetCaptureInfo(CUstream handle, CUstreamCaptureStatus *status, cuuint64_t *id, Graph **graph,
                                const CUgraphNode **nodes, const CUgraphEdgeData **edges, size_t *count) {
    CALL;
    STREAM(handle);
    Capture *capture = stream->capture;
    *status = status_of(capture);
    if (!capture) return CUDA_SUCCESS;
    if (id) *id = capture->id;
    if (graph) *graph = capture->graph;
    if (nodes) *nodes = capture->graph->nodes + capture->graph->count - 1; /* a chain: what comes next needs the last */
    if (edges) *edges = NULL;
    if (count) *count = capture->graph->count > 0;
    return CUDA_SUCCESS;
}

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *other) {
    CALL;
    CUstreamCaptureMode before = mode;
    mode = *other;
    *other = before;
    return CUDA_SUCCESS;
}

CUresult cuLaunchHostFunc(CUstream handle, CUhostFn function, void *data) {
    CALL;
    return queue(handle, (Node){CU_GRAPH_NODE_TYPE_HOST, .function = function, .data = data});
}

/* ---- events ---- */

CUresult cuEventCreate(CUevent *event, unsigned flags) {
    CALL;
    NEEDS_CONTEXT;
    *event = calloc(1, sizeof **event);
    (*event)->flags = flags;
    return CUDA_SUCCESS;
}

CUresult cuEventDestroy(CUevent event) { CALL; free(event); return CUDA_SUCCESS; }

static void record(CUevent event) {
    clock_gettime(CLOCK_MONOTONIC, &event->time);
    event->recorded = true;
}

CUresult cuEventRecordWithFlags(CUevent event, CUstream handle, unsigned flags) {
    CALL;
    NEEDS_CONTEXT;
    STREAM(handle);
    event->capture = stream->capture;
    if (!stream->capture) record(event);
    else if (flags & CU_EVENT_RECORD_EXTERNAL) /* by each replay */
        append(stream->capture->graph, (Node){CU_GRAPH_NODE_TYPE_EVENT_RECORD, .event = event});
    return CUDA_SUCCESS;
}

CUresult cuEventRecord(CUevent event, CUstream handle) { return cuEventRecordWithFlags(event, handle, 0); }

CUresult cuStreamWaitEvent(CUstream handle, CUevent event, unsigned flags) {
    CALL;
    STREAM(handle);
    if (event->capture && !event->capture->ended && !stream->capture) stream->capture = event->capture; /* it joins */
    return CUDA_SUCCESS;
}

CUresult cuEventSynchronize(CUevent event) {
    CALL;
    return event->capture && !event->capture->ended ? CUDA_ERROR_CAPTURED_EVENT : CUDA_SUCCESS;
}

CUresult cuEventQuery(CUevent event) { return cuEventSynchronize(event); }

CUresult cuEventElapsedTime(float *milliseconds, CUevent begin, CUevent end) {
    CALL;
    bool timed = begin->recorded && end->recorded && !((begin->flags | end->flags) & CU_EVENT_DISABLE_TIMING);
    if (!timed) return CUDA_ERROR_INVALID_HANDLE;
    double passed = (end->time.tv_sec - begin->time.tv_sec) * 1e3 + (end->time.tv_nsec - begin->time.tv_nsec) / 1e6;
    *milliseconds = passed > 1e-3 ? passed : 1e-3;
    return CUDA_SUCCESS;
}

/* ---- graphs; an instantiated one is a copy ---- */

static Graph *copied(const Graph *graph) {
    Graph *other = calloc(1, sizeof *other);
    for (size_t i = 0; i < graph->count; i++) append(other, *graph->nodes[i]);
    return other;
}

static void destroy(Graph *graph) {
    for (size_t i = 0; i < graph->count; i++) free(graph->nodes[i]);
    free(graph->nodes);
    free(graph);
}

CUresult cuGraphInstantiate(CUgraphExec *executable, Graph *graph, unsigned long long flags) {
    CALLED("%s, %zu nodes", __func__, graph->count);
    *executable = (CUgraphExec)copied(graph);
    return CUDA_SUCCESS;
}

CUresult cuGraphGetNodes(Graph *graph, CUgraphNode *nodes, size_t *count) {
    CALL;
    if (nodes)
        for (size_t i = 0; i < *count; i++) nodes[i] = i < graph->count ? graph->nodes[i] : NULL;
    if (!nodes || *count > graph->count) *count = graph->count;
    return CUDA_SUCCESS;
}

CUresult cuGraphLaunch(CUgraphExec executable, CUstream handle) {
    Graph *graph = (Graph *)executable;
    CALLED("%s, %zu nodes, stream %p", __func__, graph->count, handle);
    NEEDS_CONTEXT;
    STREAM(handle);
    if (stream->capture) append(stream->capture->graph, (Node){CU_GRAPH_NODE_TYPE_GRAPH, .child = copied(graph)});
    else
        for (size_t i = 0; i < graph->count; i++) run(graph->nodes[i]);
    return CUDA_SUCCESS;
}

CUresult cuGraphDestroy(Graph *graph) { CALL; destroy(graph); return CUDA_SUCCESS; }
CUresult cuGraphExecDestroy(CUgraphExec executable) { CALL; destroy((Graph *)executable); return CUDA_SUCCESS; }
CUresult cuGraphNodeGetType(CUgraphNode node, CUgraphNodeType *work) { CALL; *work = node->work; return CUDA_SUCCESS; }

/* ---- memory ---- */

typedef struct Range {
    CUdeviceptr start;
    size_t size, reserved; /* bytes asked for, and bytes of address space: 0 where somebody else has reserved it */
    bool device;           /* or pinned */
    unsigned long long id;
    struct Range *next;
} Range;

static Range *ranges;
static size_t in_use; /* bytes of the device */
static unsigned long long range_ids = 1;

static Range *range_of(CUdeviceptr address) {
    pthread_mutex_lock(&lock);
    Range *range = ranges;
    while (range && (address < range->start || address >= range->start + range->size)) range = range->next;
    pthread_mutex_unlock(&lock);
    return range;
}

static void keep(Range given) {
    Range *range = malloc(sizeof *range);
    pthread_mutex_lock(&lock);
    *range = given;
    range->id = range_ids++;
    range->next = ranges;
    ranges = range;
    in_use += given.device ? given.reserved : 0;
    pthread_mutex_unlock(&lock);
}

static CUresult allocate(CUdeviceptr *address, size_t size, bool device) {
    NEEDS_CONTEXT;
    NEEDS_NO_CAPTURE;
    if (!size) return CUDA_ERROR_INVALID_VALUE;
    size_t reserved = (size + ALLOCATION_UNIT - 1) / ALLOCATION_UNIT * ALLOCATION_UNIT;
    if (device && reserved > MEMORY - USED_BY_CONTEXT - in_use) return CUDA_ERROR_OUT_OF_MEMORY;
    void *memory = mmap(NULL, reserved, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    *address = (CUdeviceptr)memory;
    keep((Range){*address, size, reserved, device});
    return CUDA_SUCCESS;
}

static CUresult release(CUdeviceptr address) {
    CUresult result = address ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
    pthread_mutex_lock(&lock);
    for (Range **link = &ranges; *link; link = &(*link)->next) {
        Range *range = *link;
        if (range->start != address) continue;
        if (range->reserved) munmap((void *)address, range->reserved);
        in_use -= range->device ? range->reserved : 0;
        *link = range->next;
        free(range);
        result = CUDA_SUCCESS;
        break;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

CUresult cuMemGetInfo(size_t *unused, size_t *total) {
    CALL;
    NEEDS_CONTEXT;
    *total = MEMORY;
    *unused = MEMORY - USED_BY_CONTEXT - in_use;
    return CUDA_SUCCESS;
}

CUresult cuMemAlloc(CUdeviceptr *address, size_t size) {
    CALLED("%s %zu", __func__, size);
    return allocate(address, size, true);
}

CUresult cuMemFree(CUdeviceptr address) { CALL; NEEDS_NO_CAPTURE; return release(address); }

CUresult cuMemHostAlloc(void **address, size_t size, unsigned flags) {
    CALL;
    return allocate((CUdeviceptr *)address, size, false);
}

CUresult cuMemFreeHost(void *address) { CALL; return release((CUdeviceptr)address); }

CUresult cuMemHostRegister(void *address, size_t size, unsigned flags) {
    CALL;
    keep((Range){(CUdeviceptr)address, size});
    return CUDA_SUCCESS;
}

CUresult cuMemHostUnregister(void *address) { CALL; return release((CUdeviceptr)address); }

CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr address) {
    CALLED("%s %d", __func__, attribute);
    Range *range = range_of(address);
    if (!range) return CUDA_ERROR_INVALID_VALUE;
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT: *(CUcontext *)value = &primary; break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *(CUmemorytype *)value = range->device ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *(CUdeviceptr *)value = address; break;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID: *(unsigned long long *)value = range->id; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)value = 0; break;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: *(CUdeviceptr *)value = range->start; break;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE: *(size_t *)value = range->size; break;
    default: return CUDA_ERROR_NOT_SUPPORTED;
    }
    return CUDA_SUCCESS;
}

/* ---- copies and fills ---- */

static void move(const Rows *rows) {
    for (size_t row = 0; row < rows->height; row++)
        memmove(rows->to + row * rows->to_pitch, rows->from + row * rows->from_pitch, rows->width);
}

static void fill(const Rows *rows) {
    for (size_t row = 0; row < rows->height; row++) {
        char *to = rows->to + row * rows->to_pitch;
        if (rows->element == 1) memset(to, (int)rows->value, rows->width);
        else
            for (size_t i = 0; i < rows->width; i++) memcpy(to + i * rows->element, &rows->value, rows->element);
    }
}

static void run(const Node *node) {
    switch (node->work) {
    case CU_GRAPH_NODE_TYPE_MEMCPY: move(&node->rows); break;
    case CU_GRAPH_NODE_TYPE_MEMSET: fill(&node->rows); break;
    case CU_GRAPH_NODE_TYPE_HOST: node->function(node->data); break;
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD: record(node->event); break;
    case CU_GRAPH_NODE_TYPE_GRAPH:
        for (size_t i = 0; i < node->child->count; i++) run(node->child->nodes[i]);
        break;
    default: break; /* a kernel */
    }
}

CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream) {
    CALLED("%s %#llx <- %#llx, %zu bytes, stream %p", __func__, to, from, size, stream);
    return queue(stream, (Node){CU_GRAPH_NODE_TYPE_MEMCPY, {(char *)to, (char *)from, 0, 0, size, 1}});
}

CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void *from, size_t size, CUstream stream) {
    return cuMemcpyAsync(to, (CUdeviceptr)from, size, stream);
}

CUresult cuMemcpyDtoHAsync(void *to, CUdeviceptr from, size_t size, CUstream stream) {
    return cuMemcpyAsync((CUdeviceptr)to, from, size, stream);
}

CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream) {
    return cuMemcpyAsync(to, from, size, stream);
}

/* Those without a stream end before they return, which a capture forbids. */
CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t size) {
    NEEDS_NO_CAPTURE;
    return cuMemcpyAsync(to, from, size, NULL);
}

CUresult cuMemcpyHtoD(CUdeviceptr to, const void *from, size_t size) { return cuMemcpy(to, (CUdeviceptr)from, size); }
CUresult cuMemcpyDtoH(void *to, CUdeviceptr from, size_t size) { return cuMemcpy((CUdeviceptr)to, from, size); }
CUresult cuMemcpyDtoD(CUdeviceptr to, CUdeviceptr from, size_t size) { return cuMemcpy(to, from, size); }

CUresult cuMemcpy2DAsync(const CUDA_MEMCPY2D *given, CUstream stream) {
    CALL;
    if (given->srcArray || given->dstArray) return CUDA_ERROR_NOT_SUPPORTED;
    bool from_host = given->srcMemoryType == CU_MEMORYTYPE_HOST, to_host = given->dstMemoryType == CU_MEMORYTYPE_HOST;
    const char *from = from_host ? given->srcHost : (const char *)given->srcDevice;
    char *to = to_host ? given->dstHost : (char *)given->dstDevice;
    from += given->srcY * given->srcPitch + given->srcXInBytes;
    to += given->dstY * given->dstPitch + given->dstXInBytes;
    Rows rows = {to, from, given->dstPitch, given->srcPitch, given->WidthInBytes, given->Height};
    return queue(stream, (Node){CU_GRAPH_NODE_TYPE_MEMCPY, rows});
}

CUresult cuMemsetD2D8Async(CUdeviceptr to, size_t pitch, unsigned char value, size_t width, size_t height,
                           CUstream stream) {
    CALL;
    return queue(stream, (Node){CU_GRAPH_NODE_TYPE_MEMSET, {(char *)to, NULL, pitch, 0, width, height, value, 1}});
}

CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count, CUstream stream) {
    return cuMemsetD2D8Async(to, 0, value, count, 1, stream);
}

CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t count, CUstream stream) {
    CALL;
    return queue(stream, (Node){CU_GRAPH_NODE_TYPE_MEMSET, {(char *)to, NULL, 0, 0, count, 1, value, 4}});
}

/* ---- machine code: what a cubin says of its kernels ---- */

typedef struct CUlib_st Library;
typedef struct CUkern_st {
    char *name;
    int registers, static_shared, most_threads, dynamic_shared;
    int parameters; /* -1 where the code is not a cubin, which lists them */
    struct { uint16_t offset, size; } parameter[256];
    struct CUkern_st *next;
} Kernel;

struct CUlib_st {
    bool cubin;
    Kernel *kernels;
};

static Kernel *add_kernel(Library *library, const char *name) {
    Kernel *kernel = calloc(1, sizeof *kernel);
    kernel->name = strdup(name);
    kernel->registers = WARP;
    kernel->most_threads = THREADS_OF_BLOCK;
    kernel->dynamic_shared = SHARED;
    kernel->parameters = library->cubin ? 0 : -1;
    kernel->next = library->kernels;
    return library->kernels = kernel;
}

/* A section .nv.info of a kernel: entries of a format, an attribute, and two bytes of a value, or of its length. */
static void read_attributes(Kernel *kernel, const uint8_t *data, size_t size) {
    enum { OF_LENGTH = 4, PARAMETER = 0x17, THREADS = 0x05 };
    for (size_t at = 0; at + 4 <= size;) {
        uint16_t length, number, offset;
        uint32_t packed, threads[3];
        const uint8_t *value = data + at + 4;
        memcpy(&length, data + at + 2, 2);
        if (data[at] == OF_LENGTH && data[at + 1] == PARAMETER) { /* index, number, offset; from bit 18 on the size */
            memcpy(&number, value + 4, 2);
            memcpy(&offset, value + 6, 2);
            memcpy(&packed, value + 8, 4);
            if (number < 256) {
                kernel->parameter[number].offset = offset;
                kernel->parameter[number].size = packed >> 18;
                kernel->parameters = number < kernel->parameters ? kernel->parameters : number + 1;
            }
        }
        if (data[at] == OF_LENGTH && data[at + 1] == THREADS) { /* of a block, in x, y and z */
            memcpy(threads, value, sizeof threads);
            kernel->most_threads = (int)(threads[0] * threads[1] * threads[2]);
        }
        at += 4 + (data[at] == OF_LENGTH ? length : 0);
    }
}

static void read_cubin(Library *library, const char *code) {
    const Elf64_Ehdr *header = (const void *)code;
    const Elf64_Shdr *sections = (const void *)(code + header->e_shoff), *end = sections + header->e_shnum;
    const char *names = code + sections[header->e_shstrndx].sh_offset;
    for (const Elf64_Shdr *section = sections; section < end; section++)
        if (!strncmp(names + section->sh_name, ".text.", 6))
            add_kernel(library, names + section->sh_name + 6)->registers = section->sh_info >> 24;
    for (const Elf64_Shdr *section = sections; section < end; section++)
        for (Kernel *kernel = library->kernels; kernel; kernel = kernel->next) {
            const char *name = names + section->sh_name;
            if (!strncmp(name, ".nv.info.", 9) && !strcmp(name + 9, kernel->name))
                read_attributes(kernel, (const void *)(code + section->sh_offset), section->sh_size);
            if (!strncmp(name, ".nv.shared.", 11) && !strcmp(name + 11, kernel->name))
                kernel->static_shared = (int)section->sh_size - SHARED_OF_SYSTEM; /* which the section has first */
        }
}

static CUresult load(Library **library, const void *code) {
    NEEDS_CONTEXT;
    *library = calloc(1, sizeof **library);
    (*library)->cubin = !memcmp(code, ELFMAG, SELFMAG);
    CALLED("load %s", (*library)->cubin ? "a cubin" : "other code");
    if ((*library)->cubin) read_cubin(*library, code);
    return CUDA_SUCCESS;
}

static CUresult find(Kernel **kernel, Library *library, const char *name) {
    CALLED("find %s", name);
    pthread_mutex_lock(&lock);
    for (*kernel = library->kernels; *kernel && strcmp((*kernel)->name, name);) *kernel = (*kernel)->next;
    if (!*kernel && !library->cubin) *kernel = add_kernel(library, name);
    pthread_mutex_unlock(&lock);
    return *kernel ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

CUresult cuLibraryLoadData(CUlibrary *library, const void *code, CUjit_option *jit, void **jit_values,
                           unsigned jit_count, CUlibraryOption *options, void **values, unsigned count) {
    return load(library, code);
}

/* A kernel and a function, and a library and a module, are the same here. */
CUresult cuLibraryUnload(CUlibrary library) { CALL; return CUDA_SUCCESS; }

CUresult cuLibraryGetKernel(CUkernel *kernel, CUlibrary library, const char *name) {
    return find(kernel, library, name);
}

CUresult cuModuleLoadData(CUmodule *module, const void *code) { return load((Library **)module, code); }

CUresult cuModuleLoad(CUmodule *module, const char *path) {
    FILE *file = fopen(path, "rb");
    if (!file) return CUDA_ERROR_FILE_NOT_FOUND;
    fseek(file, 0, SEEK_END);
    long size = ftell(file);
    char *code = calloc(1, size + 1);
    rewind(file);
    CUresult result = fread(code, size, 1, file) == 1 ? cuModuleLoadData(module, code) : CUDA_ERROR_INVALID_VALUE;
    fclose(file);
    free(code);
    return result;
}

CUresult cuModuleUnload(CUmodule module) { CALL; return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { CALL; return CUDA_SUCCESS; }

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    return find((Kernel **)function, (Library *)module, name);
}

CUresult cuKernelGetFunction(CUfunction *function, CUkernel kernel) {
    CALL;
    NEEDS_CONTEXT;
    *function = (CUfunction)kernel;
    return CUDA_SUCCESS;
}

CUresult cuKernelGetAttribute(int *value, CUfunction_attribute attribute, CUkernel kernel, CUdevice device) {
    CALLED("%s %d", __func__, attribute);
    switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = kernel->most_threads; break;
    case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: *value = kernel->static_shared; break;
    case CU_FUNC_ATTRIBUTE_NUM_REGS: *value = kernel->registers; break;
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: *value = kernel->dynamic_shared; break;
    case CU_FUNC_ATTRIBUTE_PTX_VERSION: case CU_FUNC_ATTRIBUTE_BINARY_VERSION: *value = 90; break;
    default: *value = 0;
    }
    return CUDA_SUCCESS;
}

CUresult cuKernelSetAttribute(CUfunction_attribute attribute, int value, CUkernel kernel, CUdevice device) {
    CALLED("%s %d to %d", __func__, attribute, value);
    if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) return CUDA_SUCCESS;
    if (value + kernel->static_shared > SHARED_ON_REQUEST) return CUDA_ERROR_INVALID_VALUE;
    kernel->dynamic_shared = value;
    return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    return cuKernelGetAttribute(value, attribute, (CUkernel)function, 0);
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
    return cuKernelSetAttribute(attribute, value, (CUkernel)function, 0);
}

/* ---- launches ---- */

static int registers_of_block(const Kernel *kernel, int threads) {
    int of_warp = (kernel->registers * WARP + 255) / 256 * 256; /* in units of 256 */
    return (threads + WARP - 1) / WARP * of_warp;
}

static CUresult beyond_limits(const CUlaunchConfig *config, const Kernel *kernel) {
    uint64_t threads = (uint64_t)config->blockDimX * config->blockDimY * config->blockDimZ;
    int shared = config->sharedMemBytes;
    bool fits = threads && threads <= (uint64_t)kernel->most_threads && config->blockDimZ <= 64;
    fits &= config->gridDimX && config->gridDimY && config->gridDimZ;
    fits &= config->gridDimX <= INT32_MAX && config->gridDimY <= 65535 && config->gridDimZ <= 65535;
    int most = kernel->dynamic_shared > SHARED ? SHARED_ON_REQUEST : SHARED;
    fits &= shared <= kernel->dynamic_shared && shared + kernel->static_shared <= most;
    if (!fits) return CUDA_ERROR_INVALID_VALUE;
    return registers_of_block(kernel, (int)threads) > REGISTERS ? CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES : CUDA_SUCCESS;
}

static void say_launch(const CUlaunchConfig *config, const Kernel *kernel, void **arguments, void **extra) {
    char line[4096];
    int end = snprintf(line, sizeof line, "launch %.500s grid %u %u %u block %u %u %u shared %u stream %p",
                       kernel->name, config->gridDimX, config->gridDimY, config->gridDimZ, config->blockDimX, config->blockDimY,
                       config->blockDimZ, config->sharedMemBytes, config->hStream);
    for (unsigned i = 0; i < config->numAttrs && end < 2000; i++)
        end += snprintf(line + end, 100, " attribute %d=%u", config->attrs[i].id, *(unsigned *)&config->attrs[i].value);
    if (kernel->parameters > 0) end += snprintf(line + end, 100, " arguments");
    for (int i = 0; i < kernel->parameters && end < 3900; i++) {
        const char *from = arguments ? arguments[i] : (const char *)extra[1] + kernel->parameter[i].offset;
        unsigned long long value = 0;
        memcpy(&value, from, kernel->parameter[i].size < sizeof value ? kernel->parameter[i].size : sizeof value);
        end += snprintf(line + end, 100, " %llx", value);
    }
    say("%s", line);
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **arguments, void **extra) {
    NEEDS_CONTEXT;
    Kernel *kernel = (Kernel *)function;
    if (logs()) say_launch(config, kernel, arguments, extra);
    CUresult refused = beyond_limits(config, kernel);
    if (refused) CALLED("the launch of %s is beyond the limits", kernel->name);
    return refused ? refused : queue(config->hStream, (Node){CU_GRAPH_NODE_TYPE_KERNEL});
}

CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                        unsigned block_y, unsigned block_z, unsigned shared, CUstream stream, void **arguments,
                        void **extra) {
    CUlaunchConfig config = {grid_x, grid_y, grid_z, block_x, block_y, block_z, shared, stream};
    return cuLaunchKernelEx(&config, function, arguments, extra);
}

/* ---- how functions are found ---- */

static const char *unknown_names[1024];

static CUresult unknown(int number) {
    CALLED("%s is not part of the stand-in", unknown_names[number]);
    return CUDA_ERROR_NOT_SUPPORTED;
}

/* A function for each unknown name, which knows its number. */
#define DEFINED(n) static CUresult unknown_##n(void) { return unknown(0x##n); }
#define NAMED(n) unknown_##n,
#define TIMES_16(X, n) X(n##0) X(n##1) X(n##2) X(n##3) X(n##4) X(n##5) X(n##6) X(n##7) X(n##8) X(n##9) X(n##a) X(n##b) \
    X(n##c) X(n##d) X(n##e) X(n##f)
#define TIMES_256(X, n) TIMES_16(X, n##0) TIMES_16(X, n##1) TIMES_16(X, n##2) TIMES_16(X, n##3) TIMES_16(X, n##4) \
    TIMES_16(X, n##5) TIMES_16(X, n##6) TIMES_16(X, n##7) TIMES_16(X, n##8) TIMES_16(X, n##9) TIMES_16(X, n##a) \
    TIMES_16(X, n##b) TIMES_16(X, n##c) TIMES_16(X, n##d) TIMES_16(X, n##e) TIMES_16(X, n##f)
#define ALL(X) TIMES_256(X, 0) TIMES_256(X, 1) TIMES_256(X, 2) TIMES_256(X, 3)
ALL(DEFINED)
static CUresult (*const unknown_functions[])(void) = {ALL(NAMED)};

static void *unknown_function(const char *name) {
    CALLED("asked for %s, which is not part of the stand-in", name);
    pthread_mutex_lock(&lock);
    int i = 0;
    while (i < 1023 && unknown_names[i] && strcmp(unknown_names[i], name)) i++;
    if (!unknown_names[i]) unknown_names[i] = strdup(name);
    pthread_mutex_unlock(&lock);
    return (void *)unknown_functions[i];
}

/* A function by the name without its version, in the newest one: programs of CUDA 13 ask for no other. */
CUresult cuGetProcAddress(const char *name, void **found, int version, cuuint64_t flags,
                          CUdriverProcAddressQueryResult *status) {
    static const char *const suffixes[] = {"_v4", "_v3", "_v2", "", "WithFlags"};
    static void *self;
    Dl_info info;
    if (!self && dladdr((void *)cuInit, &info)) self = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    *found = NULL;
    for (int i = 0; i < 5 && !*found; i++) {
        char full[256];
        snprintf(full, sizeof full, "%s%s", name, suffixes[i]);
        *found = dlsym(self, full);
    }
    if (!*found) *found = unknown_function(name);
    if (status) *status = CU_GET_PROC_ADDRESS_SUCCESS;
    return CUDA_SUCCESS;
}
