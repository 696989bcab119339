/* Finding the driver's functions, and giving programs ours in their place.
 *
 * A program comes by a function of libcuda.so.1 in one of four ways, and each must end at the hook:
 *
 *   linked, or dlsym(RTLD_DEFAULT)   the loader takes the first library that exports the name: ours, because it is preloaded
 *   dlsym(handle of libcuda.so.1)    the dlsym below
 *   dlsym(RTLD_NEXT)                 the dlsym below; the loader would pass over us
 *   cuGetProcAddress                 the hooks below; the CUDA runtime asks for everything in this way
 *
 * So the library has a dlsym of its own, before libc's, and every program of the container calls it: it must be as good as none for
 * all that is not of the driver, at any time, in a constructor before ours or within malloc.
 */
#define _GNU_SOURCE
#include "library.h"

#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#if defined(__has_attribute)
#if __has_attribute(musttail)
#define TAIL_CALL __attribute__((musttail)) return
#endif
#endif
#ifndef TAIL_CALL
#define TAIL_CALL return /* gcc makes a tail call of it from -O2 on */
#endif

typedef void *dlsym_function(void *handle, const char *name);
typedef void *dlvsym_function(void *handle, const char *name, const char *version);

/* ---- libc's dlsym and dlvsym ---- */

struct search {
    const char *name;
    void *found;
};

/* A library's table of symbols has no length. Its hash table has: the last bucket's chain ends with the last symbol that is defined. */
static size_t count_symbols(const uint32_t *gnu_hash)
{
    uint32_t buckets = gnu_hash[0], first = gnu_hash[1], blooms = gnu_hash[2], last = 0;
    const uint32_t *bucket = gnu_hash + 4 + blooms * (sizeof(ElfW(Addr)) / 4), *chain = bucket + buckets;
    for (uint32_t i = 0; i < buckets; i++)
        last = bucket[i] > last ? bucket[i] : last;
    if (last < first)
        return first;
    while (!(chain[last - first] & 1)) /* the last one of a chain has the lowest bit */
        last++;
    return last + 1;
}

static int search_object(struct dl_phdr_info *object, size_t size, void *data)
{
    struct search *search = data;
    const char *file = strrchr(object->dlpi_name, '/');
    const ElfW(Sym) *symbols = NULL;
    const char *names = NULL;
    const uint32_t *gnu_hash = NULL, *hash = NULL;
    const ElfW(Dyn) *dynamic = NULL;
    (void)size;
    file = file ? file + 1 : object->dlpi_name;
    /* Up to glibc 2.33 they are in libdl.so.2, since in libc.so.6; others have wrappers like ours. */
    if (strncmp(file, "libdl.so", 8) != 0 && strncmp(file, "libc.so", 7) != 0)
        return 0;
    for (const ElfW(Phdr) *segment = object->dlpi_phdr; segment < object->dlpi_phdr + object->dlpi_phnum; segment++)
        if (segment->p_type == PT_DYNAMIC)
            dynamic = (const void *)(object->dlpi_addr + segment->p_vaddr);
    for (; dynamic && dynamic->d_tag != DT_NULL; dynamic++) {
        const void *at = (const void *)dynamic->d_un.d_ptr; /* glibc has made an address of it */
        if (dynamic->d_tag == DT_SYMTAB)
            symbols = at;
        else if (dynamic->d_tag == DT_STRTAB)
            names = at;
        else if (dynamic->d_tag == DT_GNU_HASH)
            gnu_hash = at;
        else if (dynamic->d_tag == DT_HASH)
            hash = at;
    }
    /* All are compared, without the hash: once in a process, and a bucket's search would have to know the bloom filter, too. */
    size_t count = !symbols || !names ? 0 : gnu_hash ? count_symbols(gnu_hash) : hash ? hash[1] : 0;
    for (size_t i = 0; i < count; i++)
        if (symbols[i].st_shndx != SHN_UNDEF && symbols[i].st_value && strcmp(names + symbols[i].st_name, search->name) == 0) {
            search->found = (void *)(object->dlpi_addr + symbols[i].st_value);
            return 1;
        }
    return 0;
}

/* By reading the loader's list, because every function that would look a name up allocates memory: a program's own malloc may be
   what called us. dlvsym(RTLD_NEXT, "dlsym", …) is of no use, because the dlvsym that we would call is our own. */
static void *find_in_libc(const char *name, _Atomic(void *) *known)
{
    void *found = atomic_load_explicit(known, memory_order_acquire);
    if (!found) {
        struct search search = {.name = name};
        dl_iterate_phdr(search_object, &search);
        found = search.found;
        atomic_store_explicit(known, found, memory_order_release);
    }
    return found;
}

static _Atomic(void *) libc_dlsym, libc_dlvsym;

static dlsym_function *real_dlsym(void) { return (dlsym_function *)find_in_libc("dlsym", &libc_dlsym); }

/* ---- the driver's functions ---- */

void *real_functions[SLOTS];
static bool is_in_driver[SLOTS];
static unsigned by_address[SLOTS], hooks_by_address; /* slots of hooks in order of the driver's address */
static pthread_once_t cuda_once = PTHREAD_ONCE_INIT, nvml_once = PTHREAD_ONCE_INIT, forks_once = PTHREAD_ONCE_INIT;
/* In the part of a thread's memory that is there from its start: any other model would call malloc at a thread's first use, and a
   program's malloc may be what has called dlsym. */
static __thread bool is_inside __attribute__((tls_model("initial-exec")));

static CUresult answer_not_supported(void) { return CUDA_ERROR_NOT_SUPPORTED; }
static int answer_not_found(void) { return 13; /* NVML_ERROR_FUNCTION_NOT_FOUND */ }

/* By the name that every program uses, and the loader's own search: where the file lies is each distribution's business. */
static void find_real(const char *library, unsigned from, unsigned until, void *absent)
{
    dlsym_function *find = real_dlsym();
    pthread_once(&forks_once, watch_forks);
    void *handle = find ? dlopen(library, RTLD_NOW | RTLD_LOCAL) : NULL;
    for (unsigned slot = from; slot < until; slot++) {
        void *found = handle ? find(handle, table[slot].name) : NULL;
        is_in_driver[slot] = found != NULL;
        real_functions[slot] = found ? found : absent; /* its arguments are left where they are: the ABI allows it */
    }
}

static int compare_addresses(const void *one, const void *other)
{
    uintptr_t left = (uintptr_t)real_functions[*(const unsigned *)one];
    uintptr_t right = (uintptr_t)real_functions[*(const unsigned *)other];
    return (left > right) - (left < right);
}

static void find_cuda(void)
{
    is_inside = true; /* the driver's constructors may look for functions of their own */
    find_real("libcuda.so.1", 0, FIRST_OF_NVML, (void *)answer_not_supported);
    hooks_by_address = 0; /* begun again in a child whose parent forked while it was under way */
    for (unsigned slot = 0; slot < FIRST_OF_NVML; slot++)
        if (table[slot].hook && is_in_driver[slot])
            by_address[hooks_by_address++] = slot;
    qsort(by_address, hooks_by_address, sizeof *by_address, compare_addresses);
    is_inside = false;
}

static void find_nvml(void)
{
    is_inside = true;
    find_real("libnvidia-ml.so.1", FIRST_OF_NVML, SLOTS, (void *)answer_not_found);
    is_inside = false;
}

bool has_real(unsigned slot)
{
    bool was_inside = is_inside; /* which find_cuda and find_nvml clear */
    pthread_once(slot < FIRST_OF_NVML ? &cuda_once : &nvml_once, slot < FIRST_OF_NVML ? find_cuda : find_nvml);
    is_inside = was_inside;
    return is_in_driver[slot];
}

bool enter_hook(void)
{
    if (is_inside)
        return false;
    pthread_once(&cuda_once, find_cuda);
    notice_fork();
    return is_inside = true;
}

bool enter_nvml_hook(void)
{
    if (is_inside) {
        has_real(FIRST_OF_NVML); /* the caller goes on to the real function, which nobody may have asked for before */
        return false;
    }
    pthread_once(&nvml_once, find_nvml);
    notice_fork();
    return is_inside = true;
}

void leave_hook(void) { is_inside = false; }

/* ---- dlsym ---- */

static const struct table_entry *entry_named(const char *name)
{
    size_t first = 0, count = SLOTS;
    while (count > 0) {
        size_t half = count / 2;
        int order = strcmp(name, table[first + half].name);
        if (order == 0)
            return table[first + half].hook ? &table[first + half] : NULL;
        first = order > 0 ? first + half + 1 : first;
        count = order > 0 ? count - half - 1 : half;
    }
    return NULL;
}

/* The first letters decide, so that all other names cost next to nothing. */
static const struct table_entry *hooked_entry(const char *name)
{
    bool may_be = !is_inside && name && ((name[0] == 'c' && name[1] == 'u') || (name[0] == 'n' && name[1] == 'v'));
    return may_be ? entry_named(name) : NULL;
}

/* A program that probes for a function must not find one that this driver lacks, only because we have a hook for it. */
static void *hook_or_nothing(const struct table_entry *entry, void *found)
{ return found && has_real((unsigned)(entry - table)) ? entry->hook : NULL; }

EXPORTED void *dlsym(void *restrict handle, const char *restrict name)
{
    const struct table_entry *entry = hooked_entry(name);
    dlsym_function *find = real_dlsym();
    if (!find)
        return NULL;
    if (entry)
        return hook_or_nothing(entry, find(handle, name));
    /* As a tail call: RTLD_NEXT means the library behind the caller's, which libc knows by the return address. */
    TAIL_CALL find(handle, name);
}

EXPORTED void *dlvsym(void *restrict handle, const char *restrict name, const char *restrict version)
{
    const struct table_entry *entry = hooked_entry(name);
    dlvsym_function *find = (dlvsym_function *)find_in_libc("dlvsym", &libc_dlvsym);
    if (!find)
        return NULL;
    if (entry)
        return hook_or_nothing(entry, find(handle, name, version));
    TAIL_CALL find(handle, name, version);
}

/* ---- cuGetProcAddress ---- */

static const struct table_entry *entry_at(const void *address)
{
    size_t first = 0, count = hooks_by_address;
    while (count > 0) {
        size_t half = count / 2;
        uintptr_t at = (uintptr_t)real_functions[by_address[first + half]];
        if (at == (uintptr_t)address)
            return &table[by_address[first + half]];
        first = at < (uintptr_t)address ? first + half + 1 : first;
        count = at < (uintptr_t)address ? count - half - 1 : half;
    }
    return NULL;
}

/* The newest hook of that function which is not newer than asked for. */
static const struct table_entry *entry_of_version(const char *base, int version, cuuint64_t flags)
{
    bool per_thread = (flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) != 0;
    const struct table_entry *best = NULL;
    /* Since CUDA 12 the name means the function that was cuGraphInstantiateWithFlags, with other parameters: the older hook would
       read its third one as a pointer. */
    if (strcmp(base, "cuGraphInstantiate") == 0 && version >= 12000)
        base = "cuGraphInstantiateWithFlags";
    for (unsigned i = 0; i < hooks_by_address; i++) {
        const struct table_entry *entry = &table[by_address[i]];
        if (strcmp(entry->base, base) != 0 || entry->since > version || entry->is_per_thread > per_thread)
            continue;
        if (!best || entry->is_per_thread > best->is_per_thread ||
            (entry->is_per_thread == best->is_per_thread && entry->since > best->since))
            best = entry;
    }
    return best;
}

/* What the driver answered leads to the hook by its address: then versions and flags need no rules of ours. Where a driver's answers
   are not what it exports, the name and the version decide. */
static void map_to_hook(const char *name, void **function, int version, cuuint64_t flags)
{
    if (!name || !function || !*function)
        return;
    const struct table_entry *entry = entry_at(*function);
    if (!entry && (entry = entry_of_version(name, version, flags)) != NULL && own_slot())
        atomic_fetch_add_explicit((_Atomic uint64_t *)&own_slot()->unhooked, 1, memory_order_relaxed);
    if (entry)
        *function = entry->hook;
}

HOOK(cuGetProcAddress, (const char *name, void **function, int version, cuuint64_t flags), (name, function, version, flags))
{
    CUresult result = real(name, function, version, flags);
    if (result == CUDA_SUCCESS)
        map_to_hook(name, function, version, flags);
    return result;
}

HOOK(cuGetProcAddress_v2,
     (const char *name, void **function, int version, cuuint64_t flags, CUdriverProcAddressQueryResult *status),
     (name, function, version, flags, status))
{
    CUresult result = real(name, function, version, flags, status);
    if (result == CUDA_SUCCESS)
        map_to_hook(name, function, version, flags);
    return result;
}

/* With the flag set that a program of per-thread default streams would set. */
HOOK(cuGetProcAddress_v2_ptsz,
     (const char *name, void **function, int version, cuuint64_t flags, CUdriverProcAddressQueryResult *status),
     (name, function, version, flags, status))
{
    CUresult result = real(name, function, version, flags, status);
    if (result == CUDA_SUCCESS)
        map_to_hook(name, function, version, flags | CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM);
    return result;
}
