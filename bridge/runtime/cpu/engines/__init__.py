"""Products of quantized matrices. Read `engine` first, which chooses, then `superblock`, the arithmetic of a block.

machine        weights               tokens    engine
portable       as in the file        any       portable: `forms.rowmajor`
AVX2 and more  as in the file        1         tiled: `filerows`
AVX2 and more  as in the file        several   tiled: blocks repacked tile by tile, then `interleaved`
AVX2 and more  `prepare`d, a copy    any       prepared: `interleaved`; several tokens on AVX2: `unpacked`,
                                               with prompts in Q3_K on AVX-512's VNNI: `scaled`
any            F32, F16, BF16        any       floats
any            no kernel             any       portable: dequantized for each product
"""
