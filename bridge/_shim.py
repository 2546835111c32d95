import gguf

from bridge.plan import *


def outline_from_spec(spec):
    w = gguf.GGUFWriter(None, spec.arch)
    spec.add_metadata(w)

    def part(t):
        return Part(t.source, t.shape, t.row_order, None, t.matrix, t.stored)

    out = []
    for t in spec.tensors:
        if t.data is not None:
            out.append(
                PlannedTensor(
                    t.name,
                    t.shape,
                    (),
                    t.data if t.type else np.ascontiguousarray(t.data, np.float32),
                    t.type or "F32",
                    FROM_TEMPLATE if t.type else FROM_CONFIG,
                )
            )
            continue
        out.append(
            PlannedTensor(
                t.name,
                t.shape,
                tuple(part(l) for l in t.leaves),
                None,
                None if t.quantizable else "F32",
                "" if t.quantizable else AS_IT_IS,
            )
        )
    return Outline(w.kv_data[0], out, spec.folds, spec.unused, spec.zero_only, spec.optional, spec.stop, spec.notes)
