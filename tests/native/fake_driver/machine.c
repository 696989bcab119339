#define _GNU_SOURCE
#include "machine.h"
#include "slices.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define DEFAULT_STATE "/var/lib/fake-gpu/state"
#define SECOND_NS 1000000000ull
#define SLICE_NS 20000000ull
#define LONGEST_QUEUE_NS (60 * SECOND_NS)
enum { SLICES = 128, LOCK_BASE = 0x40000000 };

typedef struct { uint64_t number, busy_ns; } slice;
typedef struct {
    uint64_t memory; /* with that of the context, and with what is managed */
    uint64_t managed;
    unsigned contexts;
    slice slices[SLICES];
} gpu_use;
typedef struct {
    int is_used, pid, host_pid;
    uint64_t pid_namespace;
    char cgroup[TEXT];
    gpu_use gpus[MAX_GPUS];
} process;
typedef struct {
    char directory[2 * TEXT]; /* empty: no limit */
    unsigned minor;
    uint64_t inode, soft, hard;
} cgroup_limit;
typedef struct { int owner, importer; unsigned minor; uint64_t bytes; } exported; /* indices of processes + 1 */
typedef struct {
    uint64_t layout;
    sim_gpu sim[MAX_GPUS];
    uint64_t busy_until_ns[MAX_GPUS];
    process processes[MAX_PROCESSES];
    cgroup_limit limits[MAX_LIMITS];
    exported shared[MAX_EXPORTED];
} state;

static const uint64_t LAYOUT = 0xfa4e000000000007ull + sizeof(state);

/* Of this process. A child of fork has none of it: its parent's GPUs are not its own, as with the real driver. */
static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;
static state *machine;
static int state_file = -1;
static process *own;

static void fail(const char *what, const char *path)
{
    fprintf(stderr, "fake driver: %s %s: %s\n", what, path, strerror(errno));
    _exit(99);
}

/* --- settings --- */

static const char *state_path(void)
{
    const char *path = getenv("FAKE_GPU_STATE");
    return path && *path ? path : DEFAULT_STATE;
}

static void path_beside(const char *name, char path[TEXT])
{
    const char *end = strrchr(state_path(), '/');
    int length = end ? (int)(end - state_path()) : 1;
    snprintf(path, TEXT, "%.*s/%s", length, end ? state_path() : ".", name);
}

static void read_setting(const char *file_text, const char *name, const char *fallback, char value[TEXT])
{
    char variable[TEXT] = "FAKE_GPU_";
    for (size_t i = 0, at = strlen(variable); name[i]; i++)
        variable[at + i] = (char)toupper(name[i]);
    const char *given = getenv(variable);
    snprintf(value, TEXT, "%s", given ? given : fallback);
    size_t length = strlen(name);
    for (const char *line = given ? NULL : file_text; line && *line; line = strchr(line, '\n'), line += line != NULL)
        if (strncmp(line, name, length) == 0 && line[length] == ' ')
            snprintf(value, TEXT, "%.*s", (int)strcspn(line + length + 1, "\n"), line + length + 1);
}

static uint64_t read_number(const char *file_text, const char *name, const char *fallback)
{
    char value[TEXT];
    read_setting(file_text, name, fallback, value);
    return strtoull(value, NULL, 10);
}

static uint64_t read_microseconds(const char *file_text, const char *name, const char *fallback)
{
    char value[TEXT];
    read_setting(file_text, name, fallback, value);
    return (uint64_t)(strtod(value, NULL) * 1000);
}

static machine_config settings;

static void read_settings(void)
{
    char path[TEXT], text[4096] = "", pids[TEXT];
    path_beside("config", path);
    FILE *file = fopen(path, "re");
    if (file) {
        text[fread(text, 1, sizeof text - 1, file)] = 0;
        fclose(file);
    }
    uint64_t gpus = read_number(text, "gpus", "8");
    settings.gpus = gpus < MAX_GPUS ? (unsigned)gpus : MAX_GPUS;
    settings.memory = read_number(text, "memory_mib", "24576") << 20;
    read_setting(text, "instances", "", pids);
    for (char *at = pids; *at && settings.instances < MAX_INSTANCES; at += strcspn(at, ","), at += *at == ',')
        settings.instance_memory[settings.instances++] = strtoull(at, NULL, 10) << 20;
    if (settings.instances && settings.gpus > FIRST_INSTANCE)
        settings.gpus = FIRST_INSTANCE;
    settings.is_unified = (int)read_number(text, "unified", "0");
    settings.numa_node = settings.is_unified ? 0 : (int)read_number(text, "numa_node", "1");
    settings.context = read_number(text, "context_mib", "300") << 20;
    settings.context_unseen = read_number(text, "context_unseen_kib", "0") << 10;
    settings.module = read_number(text, "module_mib", "2") << 20;
    settings.kernel_ns = read_number(text, "kernel_us", "1000") * 1000;
    settings.block_ns = read_number(text, "block_us", "0") * 1000;
    settings.sm_count = read_number(text, "sm_count", "132");
    settings.sample_ns = read_number(text, "sample_ms", "1000") * 1000000;
    settings.sample_every_ns = read_number(text, "sample_every_ms", "0") * 1000000;
    settings.event_percent = read_number(text, "event_percent", "100");
    settings.slice_ns = read_number(text, "slice_us", "0") * 1000;
    settings.switch_ns = read_number(text, "switch_us", "130") * 1000;
    settings.launch_ns = read_microseconds(text, "launch_us", "3.5");
    settings.wake_ns = read_microseconds(text, "wake_us", "2");
    settings.event_ns = read_microseconds(text, "event_us", "1");
    settings.boost_percent = read_number(text, "boost_percent", "0");
    read_setting(text, "rows", "each", pids);
    settings.shows_whole = !strcmp(pids, "whole") && settings.slice_ns;
    if (settings.shows_whole && !settings.sample_every_ns)
        settings.sample_every_ns = settings.sample_ns;
    settings.lag_ns = read_number(text, "lag_ms", "0") * 1000000;
    settings.cuda_version = (int)read_number(text, "cuda_version", "13000");
    settings.logs = (int)read_number(text, "log", "0");
    read_setting(text, "driver_version", "580.95.05", settings.driver_version);
    read_setting(text, "name", "NVIDIA H100 80GB HBM3", settings.name);
    read_setting(text, "uuid_prefix", "GPU-00000000-0000-4000-8000-", settings.uuid_prefix);
    read_setting(text, "devices", "", settings.devices);
    read_setting(text, "dies_in", "", settings.dies_in);
    read_setting(text, "lacks", "", settings.lacks);
    read_setting(text, "stops_in", "", settings.stops_in);
    read_setting(text, "utilization", "", settings.utilization);
    read_setting(text, "pids", "host", pids);
    settings.pids = !strcmp(pids, "open570") ? PIDS_OPEN570 : !strcmp(pids, "open") ? PIDS_OPEN : PIDS_HOST;
}

const machine_config *config(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, read_settings);
    return &settings;
}

void log_call(const char *name)
{
    if (strcmp(config()->dies_in, name) == 0)
        kill(getpid(), SIGKILL);
    static atomic_flag has_stopped = ATOMIC_FLAG_INIT;
    if (strcmp(config()->stops_in, name) == 0 && !atomic_flag_test_and_set(&has_stopped))
        kill(getpid(), SIGSTOP);
    if (config()->logs)
        fprintf(stderr, "[driver] %s\n", name);
}

/* --- which GPUs --- */

static int has_device_node(unsigned minor)
{
    char path[64];
    snprintf(path, sizeof path, "/dev/nvidia%u", minor);
    return access(path, F_OK) == 0;
}

static int is_listed(const char *devices, unsigned minor)
{
    char wanted[16];
    snprintf(wanted, sizeof wanted, is_instance(minor) ? "%u:%u" : "%u", parent_of(minor), minor - FIRST_INSTANCE);
    for (const char *word = devices; *word; word += strcspn(word, ","), word += *word == ',')
        if (strcspn(word, ",") == strlen(wanted) && strncmp(word, wanted, strlen(wanted)) == 0)
            return 1;
    return 0;
}

int is_instance(unsigned minor) { return config()->instances && minor >= FIRST_INSTANCE; }
int has_mig(unsigned minor) { return config()->instances && parent_of(minor) == 0; }
unsigned parent_of(unsigned minor) { return is_instance(minor) ? 0 : minor; }
uint64_t memory_at(unsigned minor)
{
    return is_instance(minor) ? config()->instance_memory[minor - FIRST_INSTANCE] : config()->memory;
}

unsigned visible_instances(unsigned minors[MAX_GPUS])
{
    unsigned seen[MAX_GPUS], count = 0;
    int shows_all = !strchr(config()->devices, ':') && visible_gpus(seen) && seen[0] == 0;
    for (unsigned minor = FIRST_INSTANCE; minor < FIRST_INSTANCE + config()->instances; minor++)
        if (shows_all || is_listed(config()->devices, minor))
            minors[count++] = minor;
    return count;
}

unsigned visible_gpus(unsigned minors[MAX_GPUS])
{
    const char *devices = config()->devices;
    unsigned count = 0, nodes = 0;
    for (unsigned minor = 0; minor < config()->gpus; minor++)
        nodes += has_device_node(minor);
    int shows_all = strcmp(devices, "all") == 0 || (!*devices && !nodes);
    for (unsigned minor = 0; minor < config()->gpus; minor++)
        if (shows_all || (*devices ? is_listed(devices, minor) || (has_mig(minor) && strchr(devices, ':')) : has_device_node(minor)))
            minors[count++] = minor;
    return count;
}

void gpu_uuid(unsigned minor, char text[96])
{
    snprintf(text, 96, "%.70s%012x", config()->uuid_prefix, minor);
    if (is_instance(minor))
        memcpy(text, "MIG", 3);
}
void gpu_bus_id(unsigned minor, char text[32]) { snprintf(text, 32, "00000000:%02X:00.0", 0x10 + parent_of(minor)); }

/* --- the state file --- */

static void start_anew_in_child(void)
{
    guard = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    if (state_file >= 0)
        close(state_file);
    state_file = -1;
    own = NULL;
}
__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(NULL, NULL, start_anew_in_child); }

static void open_state(void)
{
    const char *path = state_path();
    if (state_file >= 0)
        return;
    state_file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (state_file < 0)
        fail("cannot open its state", path);
    if (fchmod(state_file, 0666) != 0 && errno != EPERM) /* whatever the umask says; only the maker may */
        fail("cannot open to all its state", path);
    if (machine)
        return;
    flock(state_file, LOCK_EX);
    if (ftruncate(state_file, sizeof(state)) != 0)
        fail("cannot size its state", path);
    void *mapped = mmap(NULL, sizeof(state), PROT_READ | PROT_WRITE, MAP_SHARED, state_file, 0);
    if (mapped == MAP_FAILED)
        fail("cannot map its state", path);
    machine = mapped;
    if (machine->layout != LAYOUT) {
        if (machine->layout) /* else it is new, and full of holes */
            memset(machine, 0, sizeof(state));
        machine->layout = LAYOUT;
    }
    flock(state_file, LOCK_UN);
}

/* A step that no other thread, library or process interrupts. The kernel releases the lock of one that dies. */
static void begin(void)
{
    pthread_mutex_lock(&guard);
    open_state();
    while (flock(state_file, LOCK_EX) != 0 && errno == EINTR)
        ;
}

static void end(void)
{
    flock(state_file, LOCK_UN);
    pthread_mutex_unlock(&guard);
}

/* --- processes --- */

static struct flock byte_of(const process *entry)
{
    struct flock byte = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_len = 1};
    byte.l_start = LOCK_BASE + (entry - machine->processes);
    return byte;
}

static uint64_t own_pid_namespace(void)
{
    struct stat found;
    return stat("/proc/self/ns/pid", &found) == 0 ? found.st_ino : 0;
}

static int is_own(const process *entry)
{
    return entry == own || (!own && entry->pid == getpid() && entry->pid_namespace == own_pid_namespace());
}

/* Its PID in the caller's PID namespace, 0 where that has none for it, -1 where the process is dead. A process's own lock does not
   show to itself, though one of its two libraries, libcuda and libnvidia-ml, holds it. */
static int pid_seen_by_caller(const process *entry)
{
    struct flock byte = byte_of(entry);
    if (entry == own)
        return getpid();
    if (fcntl(state_file, F_GETLK, &byte) != 0)
        return 0;
    if (byte.l_type != F_UNLCK)
        return byte.l_pid > 0 ? byte.l_pid : 0;
    return is_own(entry) ? getpid() : -1;
}

/* What it has exported is its importer's from then on: NVML counts memory that one process alone has as that one's (open kernel
   modules, gpu_resource_desc of a client's memory that nobody shares any more). */
static void pass_on(int ended)
{
    for (exported *one = machine->shared; one < machine->shared + MAX_EXPORTED; one++) {
        if (one->importer == ended)
            one->importer = 0;
        if (one->owner != ended)
            continue;
        if ((one->owner = one->importer) != 0)
            machine->processes[one->owner - 1].gpus[one->minor].memory += one->bytes;
        one->importer = 0;
    }
}

static void clear_dead(void)
{
    for (process *entry = machine->processes; entry < machine->processes + MAX_PROCESSES; entry++)
        if (entry->is_used && pid_seen_by_caller(entry) < 0) {
            memset(entry, 0, sizeof *entry);
            pass_on((int)(entry - machine->processes) + 1);
            for (sim_gpu *sim = machine->sim; sim < machine->sim + MAX_GPUS; sim++)
                sim_forget(sim, (int)(entry - machine->processes));
        }
}

static void read_own_cgroup(char cgroup[TEXT])
{
    char line[TEXT + 16];
    FILE *file = fopen("/proc/self/cgroup", "re");
    while (file && fgets(line, sizeof line, file))
        if (strncmp(line, "0::", 3) == 0)
            snprintf(cgroup, TEXT, "%.*s", (int)strcspn(line + 3, "\n"), line + 3);
    if (file)
        fclose(file);
}

/* What host_view.py answers: "PID CGROUP". */
static int ask_host(process *entry)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct timeval patience = {.tv_sec = 2};
    char path[TEXT], answer[TEXT + 16] = "";
    path_beside("host-view", path);
    snprintf(address.sun_path, sizeof address.sun_path, "%.107s", path);
    int server = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (server < 0)
        return 0;
    setsockopt(server, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    setsockopt(server, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    int is_found = connect(server, (struct sockaddr *)&address, sizeof address) == 0 &&
                   recv(server, answer, sizeof answer - 1, MSG_WAITALL) > 0 &&
                   sscanf(answer, "%d %255s", &entry->host_pid, entry->cgroup) == 2;
    close(server);
    return is_found;
}

/* The kernel's initial PID namespace has this inode: there a process's PID is the host's. */
static int is_on_host(void) { return own_pid_namespace() == 0xEFFFFFFCull; }

static process *own_entry(void)
{
    process *entry = machine->processes;
    if (own)
        return own;
    clear_dead();
    while (entry < machine->processes + MAX_PROCESSES && entry->is_used && !is_own(entry))
        entry++;
    if (entry == machine->processes + MAX_PROCESSES)
        return NULL;
    memset(entry, 0, sizeof *entry); /* one that seems to be our own is of a program that has become this one by exec */
    struct flock byte = byte_of(entry);
    if (fcntl(state_file, F_SETLK, &byte) != 0)
        fail("cannot lock its entry in", state_path());
    entry->is_used = 1;
    entry->pid = getpid();
    entry->pid_namespace = own_pid_namespace();
    if (!ask_host(entry)) {
        entry->host_pid = is_on_host() ? getpid() : 0;
        read_own_cgroup(entry->cgroup);
    }
    return own = entry;
}

/* Of a process's two libraries the one asks for what the other has taken. */
static process *entry_of_caller(void)
{
    for (process *entry = machine->processes; entry < machine->processes + MAX_PROCESSES; entry++)
        if (entry->is_used && is_own(entry))
            return entry;
    return own_entry();
}

/* --- memory --- */

static uint64_t used_on(unsigned minor)
{
    uint64_t used = 0;
    for (const process *entry = machine->processes; entry < machine->processes + MAX_PROCESSES; entry++)
        if (entry->is_used)
            used += entry->gpus[minor].memory + entry->gpus[minor].contexts * config()->context_unseen;
    return used;
}

/* Whether the directory is that of this cgroup or of one above it. */
static int is_within(const char *cgroup, const char *directory)
{
    size_t have = strlen(directory);
    for (size_t length = strlen(cgroup); length > 1; length--)
        if ((cgroup[length] == '/' || cgroup[length] == 0) && length <= have &&
            strncmp(directory + have - length, cgroup, length) == 0)
            return 1;
    return 0;
}

static uint64_t used_within(const cgroup_limit *limit)
{
    uint64_t used = 0;
    for (const process *entry = machine->processes; entry < machine->processes + MAX_PROCESSES; entry++)
        if (entry->is_used && is_within(entry->cgroup, limit->directory))
            used += entry->gpus[limit->minor].memory - entry->gpus[limit->minor].managed;
    return used;
}

static uint64_t less(uint64_t one, uint64_t other) { return one > other ? one - other : 0; }

/* What a process may see of a GPU: the tightest limit over it, or the GPU as a whole. */
static void view_of(unsigned minor, const process *entry, uint64_t *total, uint64_t *used)
{
    *total = memory_at(minor);
    *used = used_on(minor);
    for (const cgroup_limit *limit = machine->limits; entry && limit < machine->limits + MAX_LIMITS; limit++) {
        uint64_t within;
        if (!limit->directory[0] || limit->minor != minor || !is_within(entry->cgroup, limit->directory))
            continue;
        within = used_within(limit);
        if (less(limit->hard, within) < less(*total, *used)) {
            *total = limit->hard;
            *used = within;
        }
    }
}

/* How much more memory of a GPU a process may take; without one, how much the GPU has. */
static uint64_t memory_left(unsigned minor, const process *entry)
{
    uint64_t total, used;
    view_of(minor, entry, &total, &used);
    return less(total, used);
}

static int take(unsigned minor, uint64_t bytes, int is_managed)
{
    process *entry = own_entry();
    clear_dead();
    if (!entry || bytes > memory_left(minor, is_managed ? NULL : entry))
        return 0;
    entry->gpus[minor].memory += bytes;
    entry->gpus[minor].managed += is_managed ? bytes : 0;
    return 1;
}

int take_memory(unsigned minor, uint64_t bytes, int is_managed)
{
    begin();
    int is_taken = take(minor, bytes, is_managed);
    end();
    return is_taken;
}

void give_memory(unsigned minor, uint64_t bytes, int is_managed)
{
    begin();
    if (own) {
        own->gpus[minor].memory -= bytes;
        own->gpus[minor].managed -= is_managed ? bytes : 0;
    }
    end();
}

int export_memory(unsigned minor, uint64_t bytes)
{
    int id = 0;
    begin();
    int index = (int)(own_entry() - machine->processes) + 1;
    while (id < MAX_EXPORTED && machine->shared[id].owner)
        id++;
    if (id < MAX_EXPORTED)
        machine->shared[id] = (exported){.owner = index, .minor = minor, .bytes = bytes};
    end();
    return id < MAX_EXPORTED ? id : -1;
}

int import_memory(int id)
{
    begin();
    int index = (int)(own_entry() - machine->processes) + 1;
    int is_known = id >= 0 && id < MAX_EXPORTED && machine->shared[id].owner;
    if (is_known && machine->shared[id].owner != index)
        machine->shared[id].importer = index;
    end();
    return is_known;
}

int open_context(unsigned minor)
{
    begin();
    process *entry = own_entry();
    int is_open = entry && take(minor, config()->context, 0);
    if (is_open)
        entry->gpus[minor].contexts++;
    end();
    return is_open;
}

void close_context(unsigned minor)
{
    begin();
    if (own && own->gpus[minor].contexts) {
        own->gpus[minor].contexts--;
        own->gpus[minor].memory -= config()->context;
    }
    end();
}

void memory_of_gpu(unsigned minor, uint64_t *total, uint64_t *used)
{
    begin();
    clear_dead();
    *total = memory_at(minor);
    *used = used_on(minor);
    end();
}

void memory_of_caller(unsigned minor, uint64_t *total, uint64_t *used)
{
    begin();
    clear_dead();
    view_of(minor, entry_of_caller(), total, used);
    end();
}

/* --- limits of cgroups --- */

static cgroup_limit *find_limit(unsigned minor, const char *directory)
{
    for (cgroup_limit *limit = machine->limits; limit < machine->limits + MAX_LIMITS; limit++)
        if (strcmp(limit->directory, directory) == 0 && (!directory[0] || limit->minor == minor))
            return limit;
    return NULL;
}

static uint64_t inode_of(const char *directory)
{
    struct stat found;
    return stat(directory, &found) == 0 ? found.st_ino : 0;
}

/* For who sees the directories; a container does not. */
static void clear_removed(void)
{
    for (cgroup_limit *limit = machine->limits; limit < machine->limits + MAX_LIMITS; limit++)
        if (limit->directory[0] && inode_of(limit->directory) != limit->inode)
            memset(limit, 0, sizeof *limit);
}

int set_memory_limit(unsigned minor, const char *directory, uint64_t soft, uint64_t hard)
{
    begin();
    clear_removed();
    cgroup_limit *limit = find_limit(minor, directory);
    if (!limit)
        limit = find_limit(minor, "");
    if (limit && strlen(directory) < sizeof limit->directory) {
        strcpy(limit->directory, directory);
        limit->minor = minor;
        limit->inode = inode_of(directory);
        limit->soft = soft;
        limit->hard = hard;
    } else {
        limit = NULL;
    }
    end();
    return limit != NULL;
}

int get_memory_limit(unsigned minor, const char *directory, memory_limit *found)
{
    begin();
    clear_dead();
    const cgroup_limit *limit = find_limit(minor, directory);
    if (limit && limit->inode != inode_of(directory)) /* it is another cgroup of that name */
        limit = NULL;
    if (limit)
        *found = (memory_limit){.soft = limit->soft, .hard = limit->hard, .used = used_within(limit)};
    end();
    return limit != NULL;
}

/* --- time --- */

uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * SECOND_NS + (uint64_t)now.tv_nsec;
}

void sleep_until(uint64_t time_ns)
{
    struct timespec end_at = {.tv_sec = (time_t)(time_ns / SECOND_NS), .tv_nsec = (long)(time_ns % SECOND_NS)};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &end_at, NULL) == EINTR)
        ;
}

static void note_busy(gpu_use *use, uint64_t from, uint64_t until)
{
    while (from < until) {
        uint64_t number = from / SLICE_NS, slice_end = (number + 1) * SLICE_NS;
        uint64_t stop = slice_end < until ? slice_end : until;
        slice *at = &use->slices[number % SLICES];
        if (at->number != number)
            *at = (slice){.number = number};
        at->busy_ns += stop - from;
        from = stop;
    }
}

static unsigned busy_percent(const gpu_use *use)
{
    uint64_t now = now_ns(), every = config()->sample_every_ns;
    uint64_t current = ((every ? now - now % every : now) - config()->lag_ns) / SLICE_NS, shown = config()->sample_ns / SLICE_NS, busy = 0;
    for (const slice *at = use->slices; at < use->slices + SLICES; at++)
        if (at->number < current && at->number + shown >= current)
            busy += at->busy_ns;
    return (unsigned)(busy * 100 / (shown * SLICE_NS));
}

uint64_t run_on_gpu(unsigned minor, uint64_t duration_ns)
{
    begin();
    uint64_t now = now_ns(), *busy_until = &machine->busy_until_ns[minor];
    int is_queued = *busy_until > now && *busy_until < now + LONGEST_QUEUE_NS; /* else it is of before a reboot */
    uint64_t from = is_queued ? *busy_until : now, until = from + duration_ns;
    process *entry = own_entry();
    *busy_until = until;
    if (entry)
        note_busy(&entry->gpus[minor], from, until);
    end();
    return until;
}

/* --- taking turns --- */

static unsigned advanced; /* the one that `advance` brings up to the present */
static void note_use(int index, uint64_t from, uint64_t until)
{
    if (index >= 0)
        note_busy(&machine->processes[index].gpus[advanced], from, until);
}

/* Brings the GPU up to the present; the caller's context there. */
static sim_context *advance(unsigned minor)
{
    process *entry = own_entry();
    sim_gpu *sim = &machine->sim[advanced = minor];
    uint64_t now = now_ns();
    if (now > sim->now)
        sim_advance(sim, now, note_use);
    return entry ? sim_context_of(sim, (int)(entry - machine->processes), getpid(), now) : NULL;
}

static void push(unsigned minor, unsigned lane, sim_item item, gpu_event *event)
{
    for (;;) {
        begin();
        sim_context *context = advance(minor);
        uint64_t left = context ? context->lanes[lane].left : 0;
        if (event && context) {
            sim_event *shared = &context->events[event->index % EVENTS];
            *shared = (sim_event){.record = ++event->record};
            item.event = event->index, item.record = event->record;
            event->done_at = 0;
        }
        int is_pushed = !context || sim_push(&machine->sim[minor], &context->lanes[lane], item);
        end();
        if (is_pushed)
            return;
        sleep_until(now_ns() + left / 8 + 1000);
    }
}

void push_kernel(unsigned minor, unsigned lane, uint64_t duration_ns, unsigned width, int is_timed)
{
    static uint64_t launches;
    uint64_t number = own ? (uint64_t)(own - machine->processes) : 0;
    uint64_t hash = (++launches + 1000003 * number) * 0x9e3779b97f4a7c15ull >> 40; /* the host is not always as quick */
    sleep_until(now_ns() + config()->launch_ns * (80 + hash % 50) / 100);
    push(minor, lane, (sim_item){.left = duration_ns ? duration_ns : 1, .ends = is_timed ? NOT_BEGUN : 0, .width = width ? width : 1}, NULL);
}

void push_event(unsigned minor, unsigned lane, gpu_event *event)
{
    if (!event->index) {
        begin();
        sim_context *context = advance(minor);
        event->index = context ? ++context->next_event : 1;
        end();
    }
    push(minor, lane, (sim_item){.left = config()->event_ns ? config()->event_ns : 1}, event);
}

int is_event_done(unsigned minor, gpu_event *event)
{
    if (event->record && !event->done_at) {
        begin();
        sim_context *context = advance(minor);
        if (context && context->events[event->index % EVENTS].record == event->record)
            event->done_at = context->events[event->index % EVENTS].done_at;
        end();
    }
    return !event->record || event->done_at;
}

void wait_for_lane(unsigned minor, int lane)
{
    uint32_t wanted[LANES];
    for (int is_first = 1;; is_first = 0) {
        uint64_t left = 0;
        begin();
        sim_context *context = advance(minor);
        for (int i = 0; context && i < LANES; i++) {
            if (is_first)
                wanted[i] = context->lanes[i].tail;
            if ((lane == ALL_LANES || lane == i) && (int32_t)(wanted[i] - context->lanes[i].head) > 0 && context->lanes[i].left > left)
                left = context->lanes[i].left;
        }
        end();
        if (!left)
            break;
        sleep_until(now_ns() + (left > 2000 ? left : 2000));
    }
    sleep_until(now_ns() + config()->wake_ns);
}

/* --- what NVML shows --- */

/* Which PID NVML names for a process that the caller sees as `seen` (0: not in its PID namespace), by the kernel module:
   PIDS_HOST     the proprietary one: the host's PID, in lists and in samples of utilisation
   PIDS_OPEN     the open ones, 515 to 565: lists have the caller's namespace alone, samples the host's PIDs
   PIDS_OPEN570  the open ones from 570: samples are translated too, where the process is in the caller's namespace */
static void name_pids(const process *entry, int seen, process_view *view)
{
    int host = entry->host_pid ? entry->host_pid : seen;
    view->list_pid = config()->pids == PIDS_HOST ? host : seen;
    view->sample_pid = config()->pids == PIDS_OPEN570 && seen ? seen : host;
}

unsigned list_whole_rows(unsigned minor, whole_row *rows, unsigned most)
{
    begin();
    clear_dead();
    advance(minor);
    const sim_gpu *gpu = &machine->sim[minor];
    uint64_t now = now_ns(), over = config()->sample_ns / config()->sample_every_ns;
    unsigned count = 0;
    int any = -1;
    over = over < 1 ? 1 : over > SAMPLES / 2 ? SAMPLES / 2 : over;
    for (int i = 0; i < MAX_PROCESSES; i++)
        any = machine->processes[i].is_used && machine->processes[i].gpus[minor].contexts ? i : any;
    for (unsigned back = 1; back < SAMPLES - over && count < most && any >= 0; back++) {
        const sim_sample *last = &gpu->samples[(gpu->samples_taken - back) % SAMPLES];
        const sim_sample *first = &gpu->samples[(gpu->samples_taken - back - over) % SAMPLES];
        if (gpu->samples_taken < back + over || !first->at)
            break;
        if (last->at + config()->lag_ns > now)
            continue;
        int found = last->process >= 0 && machine->processes[last->process].is_used ? last->process : any;
        process_view view;
        name_pids(&machine->processes[found], pid_seen_by_caller(&machine->processes[found]), &view);
        uint64_t percent = (last->busy - first->busy) * 100 / (last->at - first->at);
        rows[count++] = (whole_row){.at = last->at, .pid = view.sample_pid, .percent = percent > 99 ? 99 : (unsigned)percent};
    }
    end();
    return count;
}

unsigned list_processes(unsigned minor, process_view views[MAX_PROCESSES])
{
    unsigned count = 0;
    begin();
    clear_dead();
    if (config()->slice_ns)
        advance(minor);
    for (const process *entry = machine->processes; entry < machine->processes + MAX_PROCESSES; entry++)
        if (entry->is_used && entry->gpus[minor].contexts) {
            process_view *view = &views[count++];
            /* Managed memory is in no process's count (measured, H200: 520 MiB of a process that had 3,570 of it). */
            view->memory = entry->gpus[minor].memory - entry->gpus[minor].managed;
            view->percent = busy_percent(&entry->gpus[minor]);
            name_pids(entry, pid_seen_by_caller(entry), view);
        }
    end();
    return count;
}
