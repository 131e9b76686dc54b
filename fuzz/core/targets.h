/* targets.h -- the fuzz targets. Each turns any bytes into a problem that the binding could have made, computes it in
 * two ways (table, path, threads, memory) and compares the bits. See tools/fuzz.
 */
#ifndef CATTN_FUZZ_TARGETS_H
#define CATTN_FUZZ_TARGETS_H

struct input;

void fuzz_attention(struct input *in);
void fuzz_varlen(struct input *in);
void fuzz_softmax(struct input *in);
void fuzz_softmax_backward(struct input *in);
void fuzz_dropout(struct input *in);
void fuzz_rope(struct input *in);
void fuzz_norm(struct input *in);
void fuzz_norm_backward(struct input *in);
void fuzz_activation(struct input *in);
void fuzz_stream(struct input *in);

#endif
