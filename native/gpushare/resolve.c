/* Finding the driver's functions, and giving programs ours in their place.
 *
 * A program comes by a function of libcuda.so.1 in one of five ways, and each must end at the hook:
 *
 *   linked, or dlsym(RTLD_DEFAULT)   the loader takes the first library that exports the name: ours, because it is preloaded
 *   dlsym(handle of libcuda.so.1)    the dlsym below
 *   dlsym(RTLD_NEXT)                 the dlsym below; the loader would pass over us
 *   cuGetProcAddress                 the hooks below; the CUDA runtime asks for everything in this way
 *   a plugin of RTLD_DEEPBIND        deepbind.c; the loader takes the first of the plugin's own libraries
 *
 * So the library has a dlsym of its own, before libc's, and every program of the container calls it: it must be as good as none for
 * all that is not the driver's, also under the driver's names, at any time, in a constructor before ours or within malloc.
 */
#define _GNU_SOURCE
#include "library.h"

#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <signal.h>
#include <stdatomic.h>

typedef void *dlsym_function(void *handle, const char *name);
typedef void *dlvsym_function(void *handle, const char *name, const char *version);

/* ---- libc's dlsym and dlvsym ---- */

/* Until libc's dlsym is found nothing is called: a sanitizer of the program's looks for functions before its own strcmp can be called,
   and a program's malloc may be what has called us. So the comparisons are here, and the loader's list is read. */
int compare(const char *one, const char *other)
{
    for (; *one && *one == *other; one++)
        other++;
    return (unsigned char)*one - (unsigned char)*other;
}

static bool begins_with(const char *text, const char *prefix)
{
    for (; *prefix && *text == *prefix; prefix++)
        text++;
    return !*prefix;
}

static void *symbol_in(ElfW(Addr) base, const ElfW(Dyn) * dynamic, const char *name)
{
    const ElfW(Sym) *symbols = NULL;
    const char *names = NULL;
    const uint32_t *gnu_hash = NULL, *hash = NULL;
    uint32_t first = 1, last = 0, wanted = 5381;
    for (; dynamic && dynamic->d_tag != DT_NULL; dynamic++) {
        /* glibc has made an address of it, but for the kernel's own object, which is read-only. */
        ElfW(Addr) value = dynamic->d_un.d_ptr;
        const void *at = (const void *)(value < base ? base + value : value);
        if (dynamic->d_tag == DT_SYMTAB)
            symbols = at;
        else if (dynamic->d_tag == DT_STRTAB)
            names = at;
        else if (dynamic->d_tag == DT_GNU_HASH)
            gnu_hash = at;
        else if (dynamic->d_tag == DT_HASH)
            hash = at;
    }
    if (!symbols || !names)
        return NULL;
    if (gnu_hash) { /* behind a filter, which is passed over, the buckets, and for each symbol its hash without the lowest bit */
        const uint32_t *bucket = gnu_hash + 4 + gnu_hash[2] * (sizeof(ElfW(Addr)) / 4), *chain = bucket + gnu_hash[0];
        for (const char *at = name; *at; at++)
            wanted = wanted * 33 + (unsigned char)*at;
        if (gnu_hash[0] && bucket[wanted % gnu_hash[0]])
            first = last = bucket[wanted % gnu_hash[0]];
        while (last && !(chain[last - gnu_hash[1]] & 1)) /* which the last one of a bucket has */
            last++;
    } else if (hash) {
        last = hash[1] - 1;
    }
    for (uint32_t i = first; i <= last; i++)
        if (symbols[i].st_shndx != SHN_UNDEF && symbols[i].st_value && compare(names + symbols[i].st_name, name) == 0)
            return (void *)(base + symbols[i].st_value);
    return NULL;
}

static bool is_file(const char *path, const char *prefix)
{
    const char *file = path;
    for (; *path; path++)
        file = *path == '/' ? path + 1 : file;
    return begins_with(file, prefix);
}

/* Up to glibc 2.33 they are in libdl.so.2, since in libc.so.6; others have wrappers like ours. */
static bool is_of_libc(const char *path) { return is_file(path, "libdl.so") || is_file(path, "libc.so"); }

bool is_behind_driver(void)
{
    for (const struct link_map *object = _r_debug.r_map; object && object->l_ld != _DYNAMIC; object = object->l_next)
        if (is_file(object->l_name, "libcuda.so") || is_file(object->l_name, "libnvidia-ml.so"))
            return true;
    return false;
}

/* Without the loader's lock: both are there from the program's start, so before what other threads open and close. */
void *find_in_libc(const char *name, _Atomic(void *) *known)
{
    void *found = atomic_load_explicit(known, memory_order_acquire);
    for (const struct link_map *object = found ? NULL : _r_debug.r_map; object && !found; object = object->l_next)
        if (is_of_libc(object->l_name) && (found = symbol_in(object->l_addr, object->l_ld, name)) != NULL)
            atomic_store_explicit(known, found, memory_order_release);
    return found;
}

static _Atomic(void *) libc_dlsym, libc_dlvsym;

static dlsym_function *real_dlsym(void) { return (dlsym_function *)find_in_libc("dlsym", &libc_dlsym); }
static dlvsym_function *real_dlvsym(void) { return (dlvsym_function *)find_in_libc("dlvsym", &libc_dlvsym); }

/* ---- the driver's functions ---- */

static CUresult answer_not_supported(void) { return CUDA_ERROR_NOT_SUPPORTED; }
static int answer_not_found(void) { return 13; /* NVML_ERROR_FUNCTION_NOT_FOUND */ }

/* Those that are absent leave their arguments where they are: the ABI allows it. */
void *real_functions[SLOTS] = {[0 ... FIRST_OF_NVML - 1] = (void *)answer_not_supported,
                               [FIRST_OF_NVML... SLOTS - 1] = (void *)answer_not_found};
static struct driver {
    const char *library;
    unsigned from, until;
    _Atomic bool is_found;
    _Atomic uint64_t missed_at;
} cuda = {.library = "libcuda.so.1", .until = FIRST_OF_NVML},
  nvml = {.library = "libnvidia-ml.so.1", .from = FIRST_OF_NVML, .until = SLOTS};
#define RETRY_NS 100000000u /* what is not there may come, but is not looked for at each of a million calls */
/* In the part of a thread's memory that is there from its start: any other model would call malloc at a thread's first use, and a
   program's malloc may be what has called dlsym. */
static __thread uintptr_t *inside
    __attribute__((tls_model("initial-exec"))); /* in the frame of the hook that it is within; or NULL */

/* A signal's handler may have left the hook by longjmp, as interpreters do where a person interrupts them. Its frame was then below the
   caller's, or another one is in its place. A handler may have a stack of its own, too. */
static bool is_within(const uintptr_t *frame)
{
    stack_t other;
    bool has_left = inside && (frame >= inside || *inside != (uintptr_t)inside);
    if (has_left && sigaltstack(NULL, &other) == 0 && !(other.ss_flags & SS_ONSTACK))
        inside = NULL;
    return inside != NULL;
}

static void stay_within(uintptr_t *frame)
{
    *(volatile uintptr_t *)frame = (uintptr_t)frame;
    inside = frame;
}

static struct driver *driver_of(unsigned slot) { return slot < FIRST_OF_NVML ? &cuda : &nvml; }

/* By the name that every program uses, and the loader's own search: where the file lies is each distribution's business.
   Each thread that comes meanwhile does the same, with the same result. A lock that one of them held would be waited for by a library's
   constructor that calls the driver, and the loader's lock, which that constructor's thread has, by the one with the lock. `mode`:
   RTLD_NOLOAD, or 0. */
static bool open_driver(struct driver *driver, int mode)
{
    dlsym_function *find = real_dlsym();
    watch_forks();
    if (!find || (!mode && now_ns() - driver->missed_at < RETRY_NS))
        return false;
    uintptr_t *before = inside, frame;
    stay_within(&frame); /* the driver's constructors may look for functions of their own */
    void *handle = dlopen(driver->library, RTLD_NOW | RTLD_LOCAL | mode);
    for (unsigned slot = driver->from; handle && slot < driver->until; slot++) {
        void *found = find(handle, table[slot].name);
        if (found)
            atomic_store_explicit((_Atomic(void *) *)&real_functions[slot], found, memory_order_relaxed);
    }
    (void)dlerror(); /* what is absent is no error of the program's */
    inside = before;
    if (handle)
        atomic_store_explicit(&driver->is_found, true, memory_order_release);
    else if (!mode)
        driver->missed_at = now_ns();
    return handle != NULL;
}

static inline bool find_driver(struct driver *driver, int mode)
{ return atomic_load_explicit(&driver->is_found, memory_order_acquire) || open_driver(driver, mode); }

static bool is_present(unsigned slot)
{ return real_functions[slot] != (slot < FIRST_OF_NVML ? (void *)answer_not_supported : (void *)answer_not_found); }

bool has_real(unsigned slot) { return find_driver(driver_of(slot), 0) && is_present(slot); }

static bool enter(struct driver *driver, uintptr_t *frame)
{
    /* Within another hook, too: the caller goes on to the real function, which nobody may have asked for before. */
    find_driver(driver, 0);
    if (is_within(frame))
        return false;
    notice_fork();
    stay_within(frame);
    return true;
}

bool enter_hook(uintptr_t *frame) { return enter(&cuda, frame); }
bool enter_nvml_hook(uintptr_t *frame) { return enter(&nvml, frame); }

/* A function of its own: dlsym must make tail calls. */
__attribute__((noinline)) bool is_in_hook(void)
{
    uintptr_t frame = 0;
    return is_within(&frame);
}

uintptr_t *leave_hook(void)
{
    uintptr_t *frame = inside;
    inside = NULL;
    return frame;
}

/* ---- dlsym ---- */

static const struct table_entry *entry_named(const char *name)
{
    size_t first = 0, count = SLOTS;
    while (count > 0) {
        size_t half = count / 2;
        int order = compare(name, table[first + half].name);
        if (order == 0)
            return table[first + half].hook ? &table[first + half] : NULL;
        first = order > 0 ? first + half + 1 : first;
        count = order > 0 ? count - half - 1 : half;
    }
    return NULL;
}

/* The first letters decide, so that all other names cost next to nothing. */
const struct table_entry *hooked_entry(const char *name)
{
    if (is_in_hook() || !name)
        return NULL;
    if (name[0] == 'd' && name[1] == 'l')
        return loader_named(name);
    return (name[0] == 'c' && name[1] == 'u') || (name[0] == 'n' && name[1] == 'v') ? entry_named(name) : NULL;
}

/* The driver's function of that name, if the program has loaded the driver: a question must not load it. */
void *loaded_function(const struct table_entry *entry)
{
    if (entry->since < 0)
        return loader_function(entry);
    unsigned slot = (unsigned)(entry - table);
    return find_driver(driver_of(slot), RTLD_NOLOAD) && is_present(slot) ? real_functions[slot] : NULL;
}

/* The hook takes the place of the driver's own function and of no other's: a program may have a recorder or a double of the driver, a
   driver may be a loader of another one. What was found may be the hook itself, as it is exported; where the driver has no such
   function the program gets what it would find without this library, or libc's own reason why not. */
static void *hook_or_found(const struct table_entry *entry, void *found, const char *version)
{
    void *real = found ? loaded_function(entry) : NULL;
    if (found != entry->hook)
        return found && found == real && entry->since != OPENS ? entry->hook : found;
    if (real)
        return entry->hook;
    /* Kept here, so that it is no tail call: behind this library is meant, not behind the caller's. */
    void *volatile behind = version ? real_dlvsym()(RTLD_NEXT, entry->name, version) : real_dlsym()(RTLD_NEXT, entry->name);
    return behind;
}

/* RTLD_NEXT means the object behind the caller's. libc knows that by its return address, so it can only be asked by a tail call, behind
   which nothing can be replaced: what it will find is looked for here, before. */
struct next {
    const char *name;
    uintptr_t caller, driver;
    bool is_behind, has_driver;
    void *found;
};

static int look_into(struct dl_phdr_info *object, size_t size, void *data)
{
    struct next *next = data;
    const ElfW(Dyn) *dynamic = NULL;
    bool is_caller = false;
    (void)size;
    for (const ElfW(Phdr) *segment = object->dlpi_phdr; segment < object->dlpi_phdr + object->dlpi_phnum; segment++) {
        uintptr_t begin = object->dlpi_addr + segment->p_vaddr;
        if (segment->p_type == PT_DYNAMIC)
            dynamic = (const void *)begin;
        if (segment->p_type == PT_LOAD) {
            is_caller |= next->caller - begin < segment->p_memsz;
            next->has_driver |= next->driver && next->driver - begin < segment->p_memsz;
        }
    }
    if (next->is_behind)
        next->found = symbol_in(object->dlpi_addr, dynamic, next->name);
    next->is_behind |= is_caller;
    return next->found != NULL;
}

/* A library that was opened later than the driver may find that behind itself, though it lies before it. */
static bool is_hook_next(const struct table_entry *entry, void *caller)
{
    void *real = loaded_function(entry);
    struct next next = {.name = entry->name, .caller = (uintptr_t)caller, .driver = entry->since == OPENS ? 0 : (uintptr_t)real};
    dl_iterate_phdr(look_into, &next);
    return next.found == entry->hook || next.has_driver;
}

EXPORTED void *dlsym(void *restrict handle, const char *restrict name)
{
    const struct table_entry *entry = hooked_entry(name);
    dlsym_function *find = real_dlsym();
    if (!find)
        return NULL;
    if (entry && handle != RTLD_NEXT)
        return hook_or_found(entry, find(handle, name), NULL);
    if (entry && entry->since != OPENS && is_hook_next(entry, __builtin_return_address(0)))
        return hook_or_found(entry, entry->hook, NULL);
    TAIL_CALL find(handle, name);
}

EXPORTED void *dlvsym(void *restrict handle, const char *restrict name, const char *restrict version)
{
    const struct table_entry *entry = hooked_entry(name);
    dlvsym_function *find = real_dlvsym();
    if (!find)
        return NULL;
    if (entry && (handle != RTLD_NEXT || entry->since == FINDS)) /* with a version it passes over libraries like ours */
        return hook_or_found(entry, find(handle, name, version), version);
    if (entry && is_hook_next(entry, __builtin_return_address(0)))
        return hook_or_found(entry, entry->hook, version);
    TAIL_CALL find(handle, name, version);
}

/* A program built with gcc's -fsanitize=address ends at its start where a library is preloaded before that runtime, because it may have
   replaced malloc. This one has not: so the check is left out, unless the program has options of its own. */
EXPORTED const char *__asan_default_options(void);
EXPORTED const char *__asan_default_options(void)
{
    dlsym_function *find = real_dlsym();
    const char *(*next)(void) = find ? (const char *(*)(void))find(RTLD_NEXT, "__asan_default_options") : NULL;
    const char *options = next ? next() : NULL;
    return options && *options ? options : "verify_asan_link_order=0";
}

/* ---- cuGetProcAddress ---- */

static const struct table_entry *entry_at(const void *address)
{
    for (unsigned slot = 0; slot < FIRST_OF_NVML; slot++)
        if (table[slot].hook && real_functions[slot] == address && is_present(slot))
            return &table[slot];
    return NULL;
}

static void *ask_again(const char *name, int version, cuuint64_t flags)
{
    void *function = NULL;
    CUdriverProcAddressQueryResult status;
    if (has_real(SLOT_cuGetProcAddress_v2))
        REAL(cuGetProcAddress_v2)(name, &function, version, flags, &status);
    else
        REAL(cuGetProcAddress)(name, &function, version, flags);
    return function;
}

/* The newest hook of that function which is not newer than asked for, if the driver means the same function by it: one of a later CUDA
   has other parameters. */
static const struct table_entry *entry_of_version(const char *name, const void *function, int version, cuuint64_t flags)
{
    bool per_thread = (flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) != 0, is_hooked = false;
    const struct table_entry *best = NULL;
    /* Since CUDA 12 the name means the function that was cuGraphInstantiateWithFlags, with other parameters: the older hook would
       read its third one as a pointer. */
    bool is_renamed = version >= 12000 && compare(name, "cuGraphInstantiate") == 0;
    const char *base = is_renamed ? "cuGraphInstantiateWithFlags" : name;
    for (const struct table_entry *entry = table; entry < table + FIRST_OF_NVML; entry++) {
        if (!entry->hook || compare(entry->base, base) != 0)
            continue;
        is_hooked = true;
        if (!is_present((unsigned)(entry - table)) || entry->since > version || entry->is_per_thread > per_thread)
            continue;
        if (!best || entry->is_per_thread > best->is_per_thread ||
            (entry->is_per_thread == best->is_per_thread && entry->since > best->since))
            best = entry;
    }
    if (best && ask_again(name, is_renamed ? 12000 : best->since, flags) == function)
        return best;
    if (is_hooked && own_slot())
        atomic_fetch_add_explicit((_Atomic uint64_t *)&own_slot()->unhooked, 1, memory_order_relaxed);
    return NULL;
}

/* What the driver answered leads to the hook by its address: then versions and flags need no rules of ours. Where a driver's answers
   are not what it exports, the name and the version decide. */
static void map_to_hook(const char *name, void **function, int version, cuuint64_t flags)
{
    if (!name || !function || !*function)
        return;
    const struct table_entry *entry = entry_at(*function);
    if (entry || (entry = entry_of_version(name, *function, version, flags)) != NULL)
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
