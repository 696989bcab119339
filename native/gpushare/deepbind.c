/* Plugins that are opened with RTLD_DEEPBIND, as PHP opens all of its own.
 *
 * Such a plugin finds the names of its own dependencies first: libc's dlsym and the driver's functions before ours. Without the flag
 * programs break whose symbols clash. So it stays, and when libc's dlopen has returned, what the plugin and the objects that came with
 * it have bound to libc's and the driver's is led to ours. Their constructors have run by then.
 *
 * So it is with every program and plugin where an image's LD_PRELOAD, whose libraries come before ours, has the driver.
 */
#define _GNU_SOURCE
#include "library.h"

#include <dlfcn.h>
#include <link.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef void *dlopen_function(const char *file, int flags);
typedef void *dlmopen_function(Lmid_t space, const char *file, int flags);
typedef void *dlsym_function(void *handle, const char *name);

/* ---- the loader's functions, which have indices behind the driver's ---- */

enum { DLMOPEN, DLOPEN, DLSYM, DLVSYM, LOADERS, OURS = SLOTS + LOADERS };
/* A dlopen of another library is called by ours and must find libc's. One that stands before ours finds ours. */
static const struct table_entry loaders[LOADERS] = {
    {.name = "dlmopen", .hook = dlmopen, .since = OPENS},
    {.name = "dlopen", .hook = dlopen, .since = OPENS},
    {.name = "dlsym", .hook = dlsym, .since = FINDS},
    {.name = "dlvsym", .hook = dlvsym, .since = FINDS},
};

const struct table_entry *loader_named(const char *name)
{
    for (unsigned which = 0; which < LOADERS; which++)
        if (compare(name, loaders[which].name) == 0)
            return &loaders[which];
    return NULL;
}

void *loader_function(const struct table_entry *entry)
{
    static _Atomic(void *) found[LOADERS];
    return find_in_libc(entry->name, &found[entry - loaders]);
}

/* Another library's may stand between ours and libc's, as a sanitizer's does. */
static void *behind(unsigned which)
{
    static _Atomic(void *) found[LOADERS];
    dlsym_function *find = (dlsym_function *)loader_function(&loaders[DLSYM]);
    void *function = atomic_load_explicit(&found[which], memory_order_acquire);
    if (!function && find)
        atomic_store_explicit(&found[which], function = find(RTLD_NEXT, loaders[which].name), memory_order_release);
    return function;
}

static const struct table_entry *ours(unsigned index) { return index < SLOTS ? &table[index] : &loaders[index - SLOTS]; }

static unsigned index_of(const char *name)
{
    const struct table_entry *entry = hooked_entry(name);
    return !entry ? OURS : (unsigned)(entry->since >= 0 ? entry - table : SLOTS + (entry - loaders));
}

/* ---- what a plugin is bound to ---- */

struct scan {
    uintptr_t first;          /* address of the plugin; what came with it is behind it in the loader's list */
    unsigned long long loads; /* of the process */
    bool is_reached, writes, is_named[OURS];
    void *theirs[OURS];
    bool is_next[OURS]; /* what is not bound yet will be bound to theirs */
};

/* How a page is protected that was bound: read-only behind its relocations, or as its segment is; 0: it can be written. */
static int protection_of(const struct dl_phdr_info *object, uintptr_t page, uintptr_t bytes)
{
    int found = 0;
    for (const ElfW(Phdr) *segment = object->dlpi_phdr; segment < object->dlpi_phdr + object->dlpi_phnum; segment++) {
        uintptr_t from = object->dlpi_addr + segment->p_vaddr, until = from + segment->p_memsz;
        if (segment->p_type == PT_GNU_RELRO && page >= (from & -bytes) && page < (until & -bytes)) /* rounded as the loader does */
            return PROT_READ;
        if (segment->p_type == PT_LOAD && page + bytes > from && page < until)
            found = segment->p_flags & PF_W ? 0 : PROT_READ | (segment->p_flags & PF_X ? PROT_EXEC : 0);
    }
    return found;
}

static void put(void **slot, void *hook, const struct dl_phdr_info *object)
{
    static int said;
    uintptr_t bytes = (uintptr_t)sysconf(_SC_PAGESIZE), page = (uintptr_t)slot & -bytes;
    int before = protection_of(object, page, bytes);
    if (before && mprotect((void *)page, bytes, before | PROT_WRITE) != 0) {
        say_once(&said, "a plugin that is opened with RTLD_DEEPBIND is not limited, because mprotect failed");
        return;
    }
    __atomic_store_n(slot, hook, __ATOMIC_RELEASE);
    if (before)
        (void)mprotect((void *)page, bytes, before);
}

/* Called with the lock of the loader's list, so two threads never protect the same page. No dlsym in here: it takes the loader's
   other lock, which a thread has that waits for this one. */
static int scan_object(struct dl_phdr_info *object, size_t size, void *data)
{
    struct scan *scan = data;
    uintptr_t base = object->dlpi_addr, end = base, tags[DT_JMPREL + 1] = {0};
    const ElfW(Dyn) *dynamic = NULL;
    (void)size;
    if (scan->writes && scan->loads != object->dlpi_adds)
        return 1; /* there may be an object that another thread's dlopen has bound in part */
    scan->loads = object->dlpi_adds;
    scan->is_reached |= base == scan->first;
    for (unsigned i = 0; scan->is_reached && i < object->dlpi_phnum; i++) {
        const ElfW(Phdr) *segment = &object->dlpi_phdr[i];
        uintptr_t from = base + segment->p_vaddr;
        if (segment->p_type == PT_DYNAMIC)
            dynamic = (const void *)from;
        else if (segment->p_type == PT_LOAD)
            end = from + segment->p_memsz;
    }
    for (; dynamic && dynamic->d_tag != DT_NULL; dynamic++)
        if (dynamic->d_tag > 0 && dynamic->d_tag <= DT_JMPREL)
            tags[dynamic->d_tag] = dynamic->d_un.d_ptr;
    /* The loader has made addresses of the offsets, but where it cannot write them. */
    uintptr_t shift = tags[DT_SYMTAB] < base ? base : 0;
    for (int is_plt = 0; is_plt < 2; is_plt++) {
        const ElfW(Rela) *entry = (const void *)(shift + tags[is_plt ? DT_JMPREL : DT_RELA]);
        const ElfW(Rela) *last = entry + tags[is_plt ? DT_PLTRELSZ : DT_RELASZ] / sizeof *entry;
        for (; entry < last; entry++) {
            /* One that the program never calls may be broken: the loader has not looked at it. */
            const ElfW(Sym) *symbol = (const ElfW(Sym) *)(shift + tags[DT_SYMTAB]) + ELF64_R_SYM(entry->r_info);
            bool is_named = (uintptr_t)(symbol + 1) <= end && symbol->st_shndx == SHN_UNDEF && symbol->st_name < tags[DT_STRSZ];
            unsigned index = is_named ? index_of((const char *)shift + tags[DT_STRTAB] + symbol->st_name) : OURS;
            void **slot = (void **)(base + entry->r_offset);
            if (index == OURS || (uintptr_t)slot % sizeof *slot != 0)
                continue;
            bool is_unbound = (uintptr_t)*slot >= base && (uintptr_t)*slot < end; /* it leads to the code that asks the loader */
            scan->is_named[index] = true;
            if (scan->theirs[index] && (*slot == scan->theirs[index] || (is_unbound && scan->is_next[index])))
                put(slot, ours(index)->hook, object);
        }
    }
    return 0;
}

static size_t search_path_of(const void *code)
{
    Dl_serinfo paths = {0};
    struct link_map *object;
    Dl_info unused;
    bool is_known = dladdr1(code, &unused, (void **)&object, RTLD_DL_LINKMAP) && dlinfo(object, RTLD_DI_SERINFOSIZE, &paths) == 0;
    return is_known ? paths.dls_size : 0;
}

/* Of this object, and of all behind it in the loader's list. */
static void lead_to_ours(struct link_map *opened)
{
    dlsym_function *find = (dlsym_function *)loader_function(&loaders[DLSYM]);
    struct scan scan = {.first = opened->l_addr};
    do {
        scan.is_reached = scan.writes = false;
        memset(scan.theirs, 0, sizeof scan.theirs);
        dl_iterate_phdr(scan_object, &scan);
        for (unsigned i = 0; i < OURS; i++)
            if (scan.is_named[i]) {
                /* It waits for the loader's other lock: what was in the list is bound then, by whichever thread. */
                void *found = find(opened, ours(i)->name);
                found = found ? found : find(RTLD_DEFAULT, ours(i)->name);
                scan.theirs[i] = loaded_function(ours(i));
                scan.is_next[i] = found == scan.theirs[i] || found == ours(i)->hook;
            }
        scan.is_reached = false, scan.writes = true;
    } while (dl_iterate_phdr(scan_object, &scan) != 0);
}

__attribute__((constructor)) static void begin(void)
{
    if (is_behind_driver())
        lead_to_ours(_r_debug.r_map);
}

/* NULL: the caller itself must ask, and without the flag. So where its own RUNPATH or $ORIGIN decides which file it is, and where there
   is none. A function of its own, because gcc makes no tail call in one that gives away its variables' addresses. */
__attribute__((noinline)) static void *open_deep(const char *file, int flags, const void *caller)
{
    dlopen_function *open = (dlopen_function *)behind(DLOPEN);
    bool is_anyone_s = strchr(file, '/') ? !strchr(file, '$') : search_path_of(caller) == search_path_of(loaders);
    struct link_map *opened = is_anyone_s ? open(file, flags) : NULL;
    if (opened)
        lead_to_ours(opened);
    return opened;
}

static bool is_deep(const char *file, int flags)
{ return (flags & RTLD_DEEPBIND || is_behind_driver()) && file && *file && !is_in_hook(); }

EXPORTED void *dlopen(const char *file, int flags)
{
    dlopen_function *open = (dlopen_function *)behind(DLOPEN);
    void *opened = open && is_deep(file, flags) ? open_deep(file, flags, __builtin_return_address(0)) : NULL;
    if (opened || !open)
        return opened;
    flags &= is_deep(file, flags) ? ~RTLD_DEEPBIND : ~0;
    TAIL_CALL open(file, flags); /* libc knows the caller by the return address */
}

EXPORTED void *dlmopen(Lmid_t space, const char *file, int flags)
{
    dlmopen_function *open = (dlmopen_function *)behind(DLMOPEN);
    bool is_deep_here = space == LM_ID_BASE && is_deep(file, flags); /* in others there is another libc, and another driver */
    void *opened = open && is_deep_here ? open_deep(file, flags, __builtin_return_address(0)) : NULL;
    if (opened || !open)
        return opened;
    flags &= is_deep_here ? ~RTLD_DEEPBIND : ~0;
    TAIL_CALL open(space, file, flags);
}
