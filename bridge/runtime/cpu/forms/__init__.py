"""How weights and activations lie in memory, and how they get there. Read `layout` first, then `activations`.

rowmajor                         the file's own blocks, and the plain kernels that read them
layout, columns, repack          16 (8, 4) rows interleaved, and the kernels that make that of a file's blocks
unpacked_layout                  the form of a block that several tokens pass over
activations                      x rounded to int8 blocks, as ggml does it
"""
