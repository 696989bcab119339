/* A library with libgpushare's mark, MARK, that limits nothing: it passes the driver's function on; with DOES, a statement, it does
   that in its place, under a dlsym of its own. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <unistd.h>
const char mark[] = MARK;

#ifdef DOES
__attribute__((constructor)) static void begin(void)
{
    if (!dlopen("libcuda.so.1", RTLD_NOW))
        exit(3);
}
int cuInit(unsigned flags)
{
    (void)flags;
    DOES;
    return 0;
}
void *dlsym(void *handle, const char *name)
{
    void *(*real)(void *, const char *) = (void *(*)(void *, const char *))dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.34");
    return name[0] == 'c' && name[1] == 'u' && name[2] == 'I' ? (void *)cuInit : real(handle, name);
}
#else
int cuInit(unsigned flags) { return ((int (*)(unsigned))dlsym(RTLD_NEXT, "cuInit"))(flags); }
#endif
