/* The table that generate.py makes: every function of libcuda.so.1 as cuGetProcAddress names it. */
#ifndef FAKE_SYMBOLS_H
#define FAKE_SYMBOLS_H

typedef struct {
    const char *base;  /* cuMemAlloc for cuMemAlloc_v2 */
    int since;         /* 3020: from CUDA 3.2 on; 0: not known, so from the beginning */
    int is_per_thread; /* _ptsz, _ptds */
    void *function;
} driver_symbol;

extern const driver_symbol driver_symbols[]; /* ends with a base of NULL */
int answer_unsupported(const char *name, int code);

#endif
