// One table of kernels per instruction set. Rows and blocks are independent: callers may cut them among threads.
#pragma once
#include <cstdint>

enum MxRule { kRceil, kFloor, kEven };
enum Fp8Rule { kDiv, kMiles, kTe, kTePow2 };

struct Kernels {
  void (*row_amax)(const void *x, int is_bf16, float *amax, int64_t rows, int64_t columns);
  void (*mx_quantize)(const void *x, int is_bf16, uint8_t *codes, uint8_t *scales, int64_t blocks, int is_fp8,
                      int rule);
  void (*mx_dequantize)(const uint8_t *codes, const uint8_t *scales, void *out, int is_bf16, int64_t blocks,
                        int is_fp8);
  void (*fp8_quantize)(const void *x, int is_bf16, uint8_t *codes, float *scales, int64_t rows, int64_t columns,
                       int64_t block_rows, int64_t block_columns, int rule, const float *amax);
  void (*fp8_dequantize)(const uint8_t *codes, const float *scales, void *out, int is_bf16, int64_t rows,
                         int64_t columns, int64_t block_rows, int64_t block_columns);
  void (*nvfp4_quantize)(const void *x, int is_bf16, uint8_t *codes, uint8_t *scales, int64_t rows, int64_t columns,
                         const float *multipliers, const float *decodes, int64_t stride);
  void (*nvfp4_4o6_quantize)(const void *x, int is_bf16, uint8_t *codes, uint8_t *scales, int64_t rows,
                             int64_t columns, const float *encodes, const float *decodes, const float *amaxes,
                             int64_t stride, int is_squared);
  void (*nvfp4_dequantize)(const uint8_t *codes, const uint8_t *scales, void *out, int is_bf16, int64_t rows,
                           int64_t columns, const float *decodes, int64_t stride);
  void (*int4_quantize)(const void *x, int is_bf16, uint8_t *codes, uint16_t *scales, int64_t groups, int64_t size);
  void (*int4_dequantize)(const uint8_t *codes, const uint16_t *scales, void *out, int is_bf16, int64_t groups,
                          int64_t size);
};

extern const Kernels mq_portable, mq_avx2, mq_avx512;
