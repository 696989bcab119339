/* A stand-in for libnvidia-ml.so.1, as far as this project calls it.
 *
 * Every call looks at the script that FAKE_NVML_SCRIPT names, so a test changes the machine by renaming another file to
 * it (never by writing into it: the script is read again when its inode is another). Lines of the script, in any order:
 *
 *   init CODE                        nvmlInit answers CODE (default 0)
 *   version TEXT                     the driver's version, default 580.1.2
 *   driver CODE                      every call but init and shutdown answers CODE
 *   hang                             nvmlDeviceGetCount and nvmlDeviceGetUtilizationRates do not return while it is there
 *   hang_sample                      the same of nvmlDeviceGetUtilizationRates alone, which only samples ask
 *   count N
 *   card I UUID MINOR BUS_ID MEMORY_MIB MIG NAME...
 *                                    MIG is 1 for its mode on, 0 for off, 2 where the GPU has none
 *   mig I NUMBER UUID GI CI MEMORY_MIB GI_SLICES CI_SLICES PROFILE
 *                                    a MIG instance of the GPU at index I, where its MIG is 1; PROFILE is the number of its
 *                                    GPU instance profile. Other lines name it by the index 1000 + 16 * I + NUMBER; error
 *                                    1000 + … is of all its calls but the one for its UUID
 *   gi_profile I NUMBER ID SIZE SLICES COUNT SMS COPY DECODERS ENCODERS JPEG OFA MEMORY_MIB STARTS NAME...
 *                                    a GPU instance profile of the card: NUMBER is that of NVML_GPU_INSTANCE_PROFILE_…, SIZE
 *                                    counts memory slices and SLICES compute slices, COUNT is how many there can be, STARTS
 *                                    where, as 0,2,4; NAME is the driver's, - where it has none. A card with such lines has
 *                                    no other profiles, and a life cycle of instances (below)
 *   rights [config] [monitor]        what this process has of the driver's capabilities for MIG, default none. config is to
 *                                    make, remove and list; without monitor the process sees the MIG devices alone that it
 *                                    made itself
 *   ci_device parent                 the information of a compute instance has the GPU's handle, as of some drivers
 *   slow FUNCTION I PATH             a call of the life cycle writes a line to PATH, a pipe or a file, and does not return
 *                                    while this line is there
 *   kill before|after FUNCTION N     the process gets SIGKILL at the N-th call of this function since this script was set
 *   handle_error I CODE              the card at index I has no handle
 *   error I CODE                     UUID can be read, everything else of the card answers CODE
 *   stale I CODE                     as `error`, until NVML was shut down completely (all its inits) after this script was set
 *   uuid_error I CODE                the UUID cannot be read either
 *   call_error FUNCTION I CODE       one function (as the library names it) answers CODE for that card; the text of 77777 is
 *                                    no UTF-8
 *   ancestor I J LEVEL               default 50 (SYSTEM)
 *   nvlink I LINK REMOTE_TYPE BUS_ID an active link
 *   value NAME I NUMBER [NUMBER]     what a card answers; NOT_SUPPORTED without. NAME is one of utilization (of the GPU,
 *                                    of its memory), encoder, decoder, memory_used (with and without the reserved bytes),
 *                                    temperature, power, power_limit, clock_1 (SM), clock_2 (memory), clock_reasons,
 *                                    pcie_0 (sent), pcie_1 (received), remapped (pending, failed), capability, brand,
 *                                    addressing (2: ATS), numa_node
 *   fabric I STATE STATUS CLUSTER CLIQUE
 *                                    of a GPU on an NVLink fabric; CLUSTER is its UUID as 32 hexadecimal digits
 *   field I FIELD SCOPE CODE TYPE NUMBER
 *   process LIST I PID BYTES         LIST is compute, graphics or mps; BYTES - is "not available"
 *   processes LIST I PID COUNT BYTES COUNT processes, with PIDs from PID on
 *   grows LIST I N                   the first N readings of the list since this script was set find it too long; LIST is
 *                                    also samples
 *   sample I PID TIME_US SM MEMORY ENCODER DECODER
 *   sampled I PID COUNT PERIOD_US SM COUNT processes, with PIDs from PID on, each with a sample at the end of every period
 *   claims LIST I N CODE             a reading of the list answers CODE and says that there are N entries
 *   unfilled samples I N             the list has N entries more than it fills
 *   no_sample I CODE                 what is answered where no sample is new, default 6 (NOT_FOUND)
 *   event_types I MASK               what the card can report, default 10 (Xid and double-bit ECC)
 *   event NUMBER DEVICE TYPE DATA [GI CI]  delivered once, in the order of the numbers, if it was not there when the set was
 *                                    made. DEVICE is an index, 32 + index for a handle that is not the card's usual one, or
 *                                    -1 for none
 *   wait CODE                        nvmlEventSetWait answers CODE when all events are delivered
 *   waits PATH                       appends a line to PATH as a call of nvmlEventSetWait finds no event and begins to wait
 *   log PATH                         appends init, shutdown, event_set and event_set_free to PATH as they are called
 *   trace PATH                       appends each call for a card to PATH: function and index
 *
 * The life cycle of MIG instances outlives processes: what was made is in the file FAKE_NVML_SCRIPT.mig, which is rewritten
 * by a renamed file under a flock of FAKE_NVML_SCRIPT.lock. Whoever else changes it, as nvidia-smi would, does the same. Its lines:
 *
 *   gi I GI PROFILE START SIZE PID   a GPU instance: PROFILE is the ID of its profile, PID who made it
 *   ci I GI CI PROFILE START SLICES UUID PID
 *                                    a compute instance of it; PROFILE is the ID of the compute instance profile
 *   use I GI CI                      somebody uses the compute instance, or with CI -1 the GPU instance
 *   serial N                         how many compute instances there ever were: each has a UUID of its own
 *
 * Other lines name such an instance by the index 2000 + 256 * I + 16 * GI + CI. A GPU instance has the lowest free ID of those
 * for its size, as 0 for the whole GPU, 1 and 2 for halves.
 *
 * Calls may come from several threads. -DOLD_DRIVER leaves out the functions that older drivers do not have, -DNO_EVENTS those for events.
 */
#include <fcntl.h>
#include <libgen.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum {
    OK = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7, TIMEOUT = 10, IN_USE = 19, INSUFFICIENT_RESOURCES = 23
};
enum { ALIASES = 32, MIG_BASE = 1000, MIG_MAX = 7, MIG_ROOM = 16, MADE_BASE = 2000, MADE_ROOM = 256, GI_PROFILES = 18 };

typedef struct { unsigned index; } device_t;
typedef struct {
    char busIdLegacy[16];
    unsigned domain, bus, device, pciDeviceId, pciSubSystemId;
    char busId[32];
} pci_t;
typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory_v2_t;
typedef struct { unsigned gpu, memory; } utilization_t;
typedef struct { unsigned version, value; } addressing_t;
typedef struct { unsigned version, sensor; int degrees; } temperature_t;
typedef struct { unsigned pid; unsigned long long bytes; unsigned gpu_instance, compute_instance; } process_t;
typedef struct { unsigned pid; unsigned long long time_us; unsigned sm, memory, encoder, decoder; } sample_t;
typedef struct {
    unsigned field, scope;
    long long time, latency;
    unsigned type;
    int code;
    union { double real; unsigned small; unsigned long long large; } value;
} field_t;
typedef struct {
    device_t *device;
    unsigned long long type, number;
    unsigned gpu_instance, compute_instance;
} event_t;
typedef struct {
    unsigned multiprocessors, copy_engines, decoders, encoders, jpeg, ofa, gi_slices, ci_slices;
    unsigned long long memory_mib;
} attributes_t;
typedef struct { device_t *device; unsigned id, profile, start, size; } gpu_instance_info_t;
typedef struct { unsigned gpu, gi; int opening; } gpu_instance_t;
typedef struct { unsigned gi, ci, memory_mib, gi_slices, ci_slices, profile; char uuid[96]; attributes_t attributes; } mig_t;
typedef struct { unsigned minor, memory_mib, mig; char uuid[96], bus_id[32], name[96]; } card_t;

static device_t devices[64];
static device_t instances[ALIASES * MIG_ROOM];
static gpu_instance_t gpu_instances[ALIASES * MIG_ROOM];
static device_t made_devices[ALIASES * MADE_ROOM];
static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER; /* of the script and of the numbers below */
static int references; /* inits less shutdowns */
static int openings, openings_before; /* how often NVML was opened from nothing: ever, and before this script was set */
static FILE *script; /* kept open, so that no other file can get its inode */
static char *text;
static int readings; /* of growing lists, since this script was set */
static int fatal_calls; /* of the function that `kill` names, since this script was set */

static void load_script(void)
{
    const char *path = getenv("FAKE_NVML_SCRIPT");
    struct stat there, here;
    if (stat(path, &there) != 0)
        return;
    if (script && fstat(fileno(script), &here) == 0 && here.st_ino == there.st_ino)
        return;
    FILE *fresh = fopen(path, "r");
    if (script)
        fclose(script);
    script = fresh;
    free(text);
    text = calloc(1, (size_t)there.st_size + 1);
    if (fread(text, 1, (size_t)there.st_size, script) == 0)
        text[0] = 0;
    readings = fatal_calls = 0;
    openings_before = openings;
}

/* Calls `use` with each line that begins with `key`; stops at the first line that it accepts. */
static int find(const char *key, int (*use)(const char *rest, void *wanted), void *wanted)
{
    size_t length = strlen(key);
    int is_accepted = 0;
    pthread_mutex_lock(&guard);
    load_script();
    for (const char *line = text; line && *line && !is_accepted; line = strchr(line, '\n'), line += line != NULL)
        is_accepted = strncmp(line, key, length) == 0 && (line[length] == ' ' || line[length] == '\n') &&
                      use(line + length, wanted);
    pthread_mutex_unlock(&guard);
    return is_accepted;
}

static int take_int(const char *rest, void *wanted) { return sscanf(rest, "%d", (int *)wanted) == 1; }
static int take_text(const char *rest, void *wanted) { return sscanf(rest, "%255s", (char *)wanted) == 1; }
static int take_any(const char *rest, void *wanted) { (void)rest; (void)wanted; return 1; }

/* numbers[0] is the card asked for, numbers[1] becomes the code */
static int take_code(const char *rest, void *wanted)
{
    int *numbers = wanted, index, code;
    if (sscanf(rest, "%d %d", &index, &code) != 2 || index != numbers[0])
        return 0;
    numbers[1] = code;
    return 1;
}

static int take_stale_code(const char *rest, void *wanted)
{
    return openings == openings_before && take_code(rest, wanted);
}

static int take_ancestor(const char *rest, void *wanted)
{
    int *numbers = wanted, a, b, level;
    if (sscanf(rest, "%d %d %d", &a, &b, &level) != 3)
        return 0;
    if (!((a == numbers[0] && b == numbers[1]) || (a == numbers[1] && b == numbers[0])))
        return 0;
    numbers[2] = level;
    return 1;
}

struct card_wish { unsigned index; card_t card; };
static int take_card(const char *rest, void *wanted)
{
    struct card_wish *wish = wanted;
    card_t *card = &wish->card;
    unsigned index;
    int fields = sscanf(rest, "%u %95s %u %31s %u %u %95[^\n]", &index, card->uuid, &card->minor, card->bus_id,
                        &card->memory_mib, &card->mig, card->name);
    return fields == 7 && index == wish->index;
}

struct link_wish { unsigned index, link, type; char bus_id[32]; };
static int take_link(const char *rest, void *wanted)
{
    struct link_wish *wish = wanted;
    unsigned index, link;
    return sscanf(rest, "%u %u %u %31s", &index, &link, &wish->type, wish->bus_id) == 4 && index == wish->index &&
           link == wish->link;
}

struct value_wish { const char *name; unsigned index; unsigned long long numbers[2]; };
static int take_value(const char *rest, void *wanted)
{
    struct value_wish *wish = wanted;
    char name[32];
    unsigned index;
    unsigned long long numbers[2] = {0, 0};
    if (sscanf(rest, "%31s %u %llu %llu", name, &index, &numbers[0], &numbers[1]) < 3)
        return 0;
    if (index != wish->index || strcmp(name, wish->name) != 0)
        return 0;
    memcpy(wish->numbers, numbers, sizeof numbers);
    return 1;
}

static void note_in(const char *log, const char *what)
{
    char path[256];
    FILE *file;
    if (find(log, take_text, path) && (file = fopen(path, "a"))) {
        fprintf(file, "%s\n", what);
        fclose(file);
    }
}

static void note(const char *what)
{
    note_in("log", what);
}

static void trace(const char *function, const device_t *device)
{
    char path[256];
    FILE *log;
    if (find("trace", take_text, path) && (log = fopen(path, "a"))) {
        fprintf(log, "%s %u\n", function, device->index);
        fclose(log);
    }
}

static int driver_error(void)
{
    int code = OK;
    pthread_mutex_lock(&guard);
    int is_open = references > 0;
    pthread_mutex_unlock(&guard);
    if (!is_open)
        return UNINITIALIZED;
    find("driver", take_int, &code);
    return code;
}

static int card_error(device_t *device)
{
    int numbers[2] = {(int)device->index, OK}, code = driver_error();
    if (code == OK && !find("error", take_code, numbers))
        find("stale", take_stale_code, numbers);
    return code != OK ? code : numbers[1];
}

struct mig_wish { unsigned gpu, number; mig_t mig; };
static int take_mig(const char *rest, void *wanted)
{
    struct mig_wish *wish = wanted;
    mig_t *mig = &wish->mig;
    unsigned gpu, number;
    int fields = sscanf(rest, "%u %u %95s %u %u %u %u %u %u", &gpu, &number, mig->uuid, &mig->gi, &mig->ci,
                        &mig->memory_mib, &mig->gi_slices, &mig->ci_slices, &mig->profile);
    return fields == 9 && gpu == wish->gpu && number == wish->number;
}

static int get_made(unsigned place, mig_t *mig);

/* The instance that a handle stands for: NOT_FOUND where it is gone, INVALID_ARGUMENT for a GPU's handle. */
static int get_mig(device_t *device, mig_t *mig)
{
    if (device->index >= MADE_BASE)
        return get_made(device->index - MADE_BASE, mig);
    unsigned place = device->index - MIG_BASE;
    struct mig_wish wish = {.gpu = place / MIG_ROOM, .number = place % MIG_ROOM};
    int is_there = device->index >= MIG_BASE && find("mig", take_mig, &wish);
    *mig = wish.mig;
    return device->index < MIG_BASE ? INVALID_ARGUMENT : is_there ? OK : NOT_FOUND;
}

static int get_card(device_t *device, card_t *card)
{
    struct card_wish wish = {.index = device->index};
    mig_t mig = {0};
    int code = card_error(device);
    if (device->index >= MIG_BASE) {
        code = code != OK ? code : get_mig(device, &mig);
        card->memory_mib = mig.memory_mib;
        return code;
    }
    if (code == OK && !find("GPU", take_card, &wish))
        code = NOT_FOUND;
    *card = wish.card;
    return code;
}

static int scripted_error(const char *function, device_t *device);

static int get_link(device_t *device, unsigned link, struct link_wish *wish)
{
    int code = card_error(device);
    wish->index = device->index;
    wish->link = link;
    return code != OK ? code : find("nvlink", take_link, wish) ? OK : NOT_SUPPORTED;
}

static void hang(const char *key)
{
    while (find(key, take_any, NULL))
        usleep(5000);
}

int nvmlInitWithFlags(unsigned flags)
{
    int code = OK;
    (void)flags;
    find("init", take_int, &code);
    pthread_mutex_lock(&guard);
    if (code == OK && references++ == 0)
        openings++;
    pthread_mutex_unlock(&guard);
    note("init");
    return code;
}

int nvmlShutdown(void)
{
    pthread_mutex_lock(&guard);
    int code = references > 0 ? OK : UNINITIALIZED;
    references -= code == OK;
    pthread_mutex_unlock(&guard);
    note("shutdown");
    return code;
}

const char *nvmlErrorString(int code) { return code == 77777 ? "\xf8\x95" : "scripted error"; }

int nvmlDeviceGetCount_v2(unsigned *count)
{
    hang("hang");
    *count = 0;
    int code = driver_error();
    if (code == OK)
        find("count", take_int, count);
    return code;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, device_t **device)
{
    int numbers[2] = {(int)index, OK}, code = driver_error();
    if (code == OK)
        find("handle_error", take_code, numbers);
    if (index >= ALIASES)
        return INVALID_ARGUMENT;
    devices[index % ALIASES].index = devices[ALIASES + index % ALIASES].index = index;
    *device = &devices[index % ALIASES];
    return code != OK ? code : numbers[1];
}

int nvmlDeviceGetUUID(device_t *device, char *answer, unsigned size)
{
    struct card_wish wish = {.index = device->index};
    int numbers[2] = {(int)device->index, OK}, code = driver_error();
    mig_t mig;
    if (code == OK && device->index >= MIG_BASE) {
        code = get_mig(device, &mig);
        snprintf(answer, size, "%s", mig.uuid);
        return code;
    }
    if (code == OK && find("uuid_error", take_code, numbers))
        return numbers[1];
    if (code == OK && !find("GPU", take_card, &wish))
        return NOT_FOUND;
    snprintf(answer, size, "%s", wish.card.uuid);
    return code;
}

int nvmlDeviceGetName(device_t *device, char *answer, unsigned size)
{
    card_t card = {0};
    int code = get_card(device, &card);
    snprintf(answer, size, "%s", card.name);
    return code != OK ? code : scripted_error(__func__, device);
}

int nvmlSystemGetDriverVersion(char *answer, unsigned size)
{
    char version[256] = "580.1.2";
    find("version", take_text, version);
    snprintf(answer, size, "%s", version);
    return driver_error();
}

int nvmlSystemGetCudaDriverVersion(int *version)
{
    *version = 13010;
    return driver_error();
}

int nvmlDeviceGetMinorNumber(device_t *device, unsigned *minor)
{
    card_t card = {0};
    int code = get_card(device, &card);
    *minor = card.minor;
    return code != OK ? code : scripted_error(__func__, device);
}

int nvmlDeviceGetMemoryInfo(device_t *device, memory_t *memory)
{
    struct value_wish used = {.name = "memory_used", .index = device->index};
    card_t card = {0};
    int code = get_card(device, &card);
    find("value", take_value, &used);
    memory->total = card.memory_mib * 1024ULL * 1024ULL;
    memory->used = used.numbers[0];
    memory->free = memory->total - memory->used;
    return code != OK ? code : scripted_error(__func__, device);
}

int nvmlDeviceGetMigMode(device_t *device, unsigned *current, unsigned *pending)
{
    card_t card = {0};
    int code = get_card(device, &card);
    *current = *pending = card.mig == 1;
    code = code != OK ? code : scripted_error(__func__, device);
    return code == OK && card.mig > 1 ? NOT_SUPPORTED : code;
}

int nvmlDeviceGetMaxMigDeviceCount(device_t *device, unsigned *count)
{
    int code = card_error(device);
    *count = MIG_MAX;
    return code;
}

static int find_made(unsigned gpu, unsigned number, device_t **instance);

int nvmlDeviceGetMigDeviceHandleByIndex(device_t *device, unsigned number, device_t **instance)
{
    struct mig_wish wish = {.gpu = device->index, .number = number};
    unsigned place = device->index % ALIASES * MIG_ROOM + number;
    card_t card = {0};
    int code = get_card(device, &card);
    if (code == OK && card.mig == 1 && find_made(device->index, number, instance))
        return OK;
    if (code == OK && (!card.mig || number >= MIG_ROOM || !find("mig", take_mig, &wish)))
        return NOT_FOUND;
    instances[place].index = MIG_BASE + place;
    *instance = &instances[place];
    return code;
}

static int get_mig_of(device_t *device, mig_t *mig)
{
    int code = card_error(device);
    return code != OK ? code : get_mig(device, mig);
}

int nvmlDeviceGetGpuInstanceId(device_t *device, unsigned *id)
{
    mig_t mig = {0};
    int code = get_mig_of(device, &mig);
    *id = mig.gi;
    return code;
}

int nvmlDeviceGetComputeInstanceId(device_t *device, unsigned *id)
{
    mig_t mig = {0};
    int code = get_mig_of(device, &mig);
    *id = mig.ci;
    return code;
}

int nvmlDeviceGetAttributes_v2(device_t *device, attributes_t *attributes)
{
    mig_t mig = {0};
    int code = get_mig_of(device, &mig);
    *attributes = mig.attributes.multiprocessors ? mig.attributes : (attributes_t){
        .gi_slices = mig.gi_slices, .ci_slices = mig.ci_slices, .memory_mib = mig.memory_mib,
        .multiprocessors = 14 * mig.ci_slices, .copy_engines = mig.gi_slices, .decoders = mig.gi_slices / 2,
        .encoders = 1, .jpeg = 2, .ofa = 3};
    return code;
}

int nvmlDeviceGetPciInfo_v3(device_t *device, pci_t *pci)
{
    card_t card = {0};
    int code = get_card(device, &card);
    snprintf(pci->busId, sizeof pci->busId, "%s", card.bus_id);
    return code != OK ? code : scripted_error(__func__, device);
}

int nvmlDeviceGetTopologyCommonAncestor(device_t *first, device_t *second, unsigned *level)
{
    int numbers[3] = {(int)first->index, (int)second->index, 50}, code = card_error(first);
    find("ancestor", take_ancestor, numbers);
    *level = (unsigned)numbers[2];
    return code != OK ? code : card_error(second);
}

int nvmlDeviceGetNvLinkState(device_t *device, unsigned link, unsigned *active)
{
    struct link_wish wish = {0};
    int code = get_link(device, link, &wish);
    *active = code == OK;
    return link >= 18 ? INVALID_ARGUMENT : code == NOT_SUPPORTED ? OK : code;
}

int nvmlDeviceGetNvLinkRemotePciInfo_v2(device_t *device, unsigned link, pci_t *pci)
{
    struct link_wish wish = {0};
    int code = get_link(device, link, &wish);
    snprintf(pci->busId, sizeof pci->busId, "%s", wish.bus_id);
    return code;
}

int nvmlDeviceGetNvLinkRemoteDeviceType(device_t *device, unsigned link, unsigned *type)
{
    struct link_wish wish = {0};
    int code = get_link(device, link, &wish);
    *type = wish.type;
    return code;
}

/* What one card answers to one function. */

struct call_wish { const char *function; unsigned index; int code; };
static int take_call_error(const char *rest, void *wanted)
{
    struct call_wish *wish = wanted;
    char function[64];
    unsigned index;
    return sscanf(rest, "%63s %u %d", function, &index, &wish->code) == 3 && index == wish->index &&
           strcmp(function, wish->function) == 0;
}

static int scripted_error(const char *function, device_t *device)
{
    struct call_wish wish = {.function = function, .index = device->index};
    return find("call_error", take_call_error, &wish) ? wish.code : OK;
}

static int call_error(const char *function, device_t *device)
{
    int code = card_error(device);
    trace(function, device);
    return code != OK ? code : scripted_error(function, device);
}

static int get_value(const char *function, device_t *device, const char *name, unsigned long long numbers[2])
{
    struct value_wish wish = {.name = name, .index = device->index};
    int code = call_error(function, device);
    if (code == OK && !find("value", take_value, &wish))
        code = NOT_SUPPORTED;
    memcpy(numbers, wish.numbers, sizeof wish.numbers);
    return code;
}

static int get_number(const char *function, device_t *device, const char *name, unsigned *number)
{
    unsigned long long numbers[2];
    int code = get_value(function, device, name, numbers);
    *number = (unsigned)numbers[0];
    return code;
}

int nvmlDeviceGetUtilizationRates(device_t *device, utilization_t *rates)
{
    unsigned long long numbers[2];
    hang("hang");
    hang("hang_sample");
    int code = get_value(__func__, device, "utilization", numbers);
    *rates = (utilization_t){(unsigned)numbers[0], (unsigned)numbers[1]};
    return code;
}

int nvmlDeviceGetEncoderUtilization(device_t *device, unsigned *percent, unsigned *period_us)
{
    *period_us = 167000;
    return get_number(__func__, device, "encoder", percent);
}

int nvmlDeviceGetDecoderUtilization(device_t *device, unsigned *percent, unsigned *period_us)
{
    *period_us = 167000;
    return get_number(__func__, device, "decoder", percent);
}

int nvmlDeviceGetTemperature(device_t *device, unsigned sensor, unsigned *degrees)
{
    (void)sensor;
    return get_number(__func__, device, "temperature", degrees);
}

int nvmlDeviceGetPowerUsage(device_t *device, unsigned *milliwatts)
{
    return get_number(__func__, device, "power", milliwatts);
}

int nvmlDeviceGetEnforcedPowerLimit(device_t *device, unsigned *milliwatts)
{
    return get_number(__func__, device, "power_limit", milliwatts);
}

int nvmlDeviceGetClockInfo(device_t *device, unsigned type, unsigned *mhz)
{
    return get_number(__func__, device, type == 1 ? "clock_1" : "clock_2", mhz);
}

int nvmlDeviceGetPcieThroughput(device_t *device, unsigned counter, unsigned *kilobytes)
{
    return get_number(__func__, device, counter == 0 ? "pcie_0" : "pcie_1", kilobytes);
}

int nvmlDeviceGetCurrentClocksThrottleReasons(device_t *device, unsigned long long *mask)
{
    unsigned long long numbers[2];
    int code = get_value(__func__, device, "clock_reasons", numbers);
    *mask = numbers[0];
    return code;
}

int nvmlDeviceGetCudaComputeCapability(device_t *device, int *major, int *minor)
{
    unsigned long long numbers[2];
    int code = get_value(__func__, device, "capability", numbers);
    *major = (int)numbers[0];
    *minor = (int)numbers[1];
    return code;
}

int nvmlDeviceGetBrand(device_t *device, int *brand)
{
    unsigned long long numbers[2];
    int code = get_value(__func__, device, "brand", numbers);
    *brand = (int)numbers[0];
    return code;
}

typedef struct { unsigned char cluster[16]; int status; unsigned clique, state; } fabric_t;
struct fabric_wish { unsigned index; fabric_t *info; };

static int take_fabric(const char *rest, void *wanted)
{
    struct fabric_wish *wish = wanted;
    unsigned index, byte;
    char cluster[33];
    fabric_t *info = wish->info;
    if (sscanf(rest, "%u %u %d %32s %u", &index, &info->state, &info->status, cluster, &info->clique) != 5)
        return 0;
    for (unsigned at = 0; at < sizeof info->cluster; at++)
        info->cluster[at] = sscanf(cluster + 2 * at, "%2x", &byte) == 1 ? (unsigned char)byte : 0;
    return index == wish->index;
}

int nvmlDeviceGetGpuFabricInfo(device_t *device, fabric_t *info)
{
    struct fabric_wish wish = {.index = device->index, .info = info};
    int code = call_error(__func__, device);
    return code != OK || find("fabric", take_fabric, &wish) ? code : NOT_SUPPORTED;
}

/* Lists. */

struct list_wish {
    const char *name;
    unsigned index, found, room;
    process_t *processes;
    sample_t *samples;
    unsigned long long since_us;
};

static int take_process(const char *rest, void *wanted)
{
    struct list_wish *wish = wanted;
    char name[32], bytes[32];
    unsigned index, pid;
    if (sscanf(rest, "%31s %u %u %31s", name, &index, &pid, bytes) != 4)
        return 0;
    if (index != wish->index || strcmp(name, wish->name) != 0)
        return 0;
    if (wish->found < wish->room) {
        unsigned long long size = strcmp(bytes, "-") == 0 ? ~0ULL : strtoull(bytes, NULL, 10);
        wish->processes[wish->found] = (process_t){.pid = pid, .bytes = size};
    }
    wish->found++;
    return 0;
}

static int take_processes(const char *rest, void *wanted)
{
    struct list_wish *wish = wanted;
    char name[32];
    unsigned index, pid, count;
    unsigned long long bytes;
    if (sscanf(rest, "%31s %u %u %u %llu", name, &index, &pid, &count, &bytes) != 5)
        return 0;
    if (index != wish->index || strcmp(name, wish->name) != 0)
        return 0;
    for (unsigned i = 0; i < count; i++, wish->found++)
        if (wish->found < wish->room)
            wish->processes[wish->found] = (process_t){.pid = pid + i, .bytes = bytes};
    return 0;
}

static int take_sample(const char *rest, void *wanted)
{
    struct list_wish *wish = wanted;
    sample_t sample;
    unsigned index;
    if (sscanf(rest, "%u %u %llu %u %u %u %u", &index, &sample.pid, &sample.time_us, &sample.sm, &sample.memory,
               &sample.encoder, &sample.decoder) != 7)
        return 0;
    if (index != wish->index || sample.time_us <= wish->since_us)
        return 0;
    if (wish->found < wish->room)
        wish->samples[wish->found] = sample;
    wish->found++;
    return 0;
}

static int take_sampled(const char *rest, void *wanted)
{
    struct list_wish *wish = wanted;
    struct timespec now;
    unsigned long long period_us, newest_us;
    unsigned index, pid, count, busy;
    if (sscanf(rest, "%u %u %u %llu %u", &index, &pid, &count, &period_us, &busy) != 5 || index != wish->index)
        return 0;
    clock_gettime(CLOCK_REALTIME, &now);
    newest_us = (unsigned long long)now.tv_sec * 1000000 + (unsigned long long)now.tv_nsec / 1000;
    newest_us -= newest_us % period_us;
    for (unsigned i = 0; i < count && newest_us > wish->since_us; i++, wish->found++)
        if (wish->found < wish->room)
            wish->samples[wish->found] = (sample_t){.pid = pid + i, .time_us = newest_us, .sm = busy};
    return 0;
}

static int answer_list(struct list_wish *wish, unsigned *count)
{
    struct value_wish grows = {.name = wish->name, .index = wish->index}, unfilled = grows, claims = grows;
    int is_reading = wish->room > 0;
    if (find("unfilled", take_value, &unfilled))
        wish->found += (unsigned)unfilled.numbers[0];
    *count = wish->found;
    if (is_reading && find("claims", take_value, &claims)) {
        *count = (unsigned)claims.numbers[0];
        return (int)claims.numbers[1];
    }
    if (is_reading && find("grows", take_value, &grows) && readings < (int)grows.numbers[0]) {
        readings++;
        return INSUFFICIENT_SIZE;
    }
    return wish->found > wish->room ? INSUFFICIENT_SIZE : OK;
}

static int get_processes(const char *function, device_t *device, const char *name, unsigned *count, process_t *list)
{
    struct list_wish wish = {.name = name, .index = device->index, .processes = list, .room = list ? *count : 0};
    int code = call_error(function, device);
    if (code != OK)
        return code;
    find("process", take_process, &wish);
    find("processes", take_processes, &wish);
    return answer_list(&wish, count);
}

int nvmlDeviceGetProcessUtilization(device_t *device, sample_t *list, unsigned *count, unsigned long long since_us)
{
    struct list_wish wish = {
        .name = "samples", .index = device->index, .samples = list, .room = list ? *count : 0, .since_us = since_us};
    int numbers[2] = {(int)device->index, NOT_FOUND}, code = call_error(__func__, device);
    if (code != OK)
        return code;
    find("sample", take_sample, &wish);
    find("sampled", take_sampled, &wish);
    if (wish.found > 0)
        return answer_list(&wish, count);
    *count = 0;
    find("no_sample", take_code, numbers);
    return numbers[1];
}

#ifdef OLD_DRIVER

int nvmlDeviceGetComputeRunningProcesses_v2(device_t *device, unsigned *count, process_t *list)
{
    return get_processes(__func__, device, "compute", count, list);
}

#else

int nvmlDeviceGetComputeRunningProcesses_v3(device_t *device, unsigned *count, process_t *list)
{
    return get_processes(__func__, device, "compute", count, list);
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(device_t *device, unsigned *count, process_t *list)
{
    return get_processes(__func__, device, "graphics", count, list);
}

int nvmlDeviceGetMPSComputeRunningProcesses_v3(device_t *device, unsigned *count, process_t *list)
{
    return get_processes(__func__, device, "mps", count, list);
}

int nvmlDeviceGetMemoryInfo_v2(device_t *device, memory_v2_t *memory)
{
    unsigned long long numbers[2];
    card_t card = {0};
    int code = get_value(__func__, device, "memory_used", numbers);
    if (code == OK)
        code = get_card(device, &card);
    memory->total = card.memory_mib * 1024ULL * 1024ULL;
    memory->used = numbers[1];
    memory->reserved = numbers[0] - numbers[1];
    memory->free = memory->total - numbers[0];
    return code;
}

int nvmlDeviceGetTemperatureV(device_t *device, temperature_t *temperature)
{
    return get_number(__func__, device, "temperature", (unsigned *)&temperature->degrees);
}

int nvmlDeviceGetCurrentClocksEventReasons(device_t *device, unsigned long long *mask)
{
    unsigned long long numbers[2];
    int code = get_value(__func__, device, "clock_reasons", numbers);
    *mask = numbers[0];
    return code;
}

int nvmlDeviceGetRemappedRows(device_t *device, unsigned *corrected, unsigned *uncorrected, unsigned *pending,
                              unsigned *failure)
{
    unsigned long long numbers[2];
    int code = get_value(__func__, device, "remapped", numbers);
    *corrected = *uncorrected = 0;
    *pending = (unsigned)numbers[0];
    *failure = (unsigned)numbers[1];
    return code;
}

struct field_wish { unsigned index; field_t *field; };
static int take_field(const char *rest, void *wanted)
{
    struct field_wish *wish = wanted;
    unsigned index, field, scope, type;
    int code;
    unsigned long long number;
    if (sscanf(rest, "%u %u %u %d %u %llu", &index, &field, &scope, &code, &type, &number) != 6)
        return 0;
    if (index != wish->index || field != wish->field->field || scope != wish->field->scope)
        return 0;
    wish->field->code = code;
    wish->field->type = type;
    if (type == 0)
        wish->field->value.real = number == ~0ULL ? __builtin_nan("") : (double)number;
    else if (type == 1)
        wish->field->value.small = (unsigned)number;
    else
        wish->field->value.large = number;
    return 1;
}

int nvmlDeviceGetFieldValues(device_t *device, int count, field_t *fields)
{
    int code = call_error(__func__, device);
    for (int i = 0; code == OK && i < count; i++) {
        struct field_wish wish = {device->index, &fields[i]};
        memset(&fields[i].value, 0xff, sizeof fields[i].value);
        if (!find("field", take_field, &wish))
            fields[i].code = NOT_SUPPORTED;
    }
    return code;
}

#endif

/* The life cycle of MIG instances. */

typedef struct {
    unsigned gpu, number, id, size, slices, count, sms, copy, decoders, encoders, jpeg, ofa, memory_mib, starts[16], places;
    char name[96];
} profile_t;
typedef struct {
    unsigned id, p2p, slices, count, sms, copy, decoders, encoders, jpeg, ofa;
    unsigned long long memory_mib;
} profile_info_t;
typedef struct { unsigned version, id, p2p, slices, count, sms, copy, decoders, encoders, jpeg, ofa; unsigned long long memory_mib; char name[96]; } profile_info_v2_t;
typedef struct { unsigned id, slices, count, sms, copy, decoders, encoders, jpeg, ofa; } ci_profile_info_t;
typedef struct { unsigned version; ci_profile_info_t info; char name[96]; } ci_profile_info_v2_t;
typedef struct { unsigned start, size; } placement_t;
typedef struct { unsigned gpu, gi, ci; int opening; } compute_instance_t;
typedef struct { device_t *device; gpu_instance_t *instance; unsigned id, profile; placement_t placement; } ci_info_t;

struct gi { unsigned gpu, id, profile, start, size; int pid; };
struct ci { unsigned gpu, gi, id, profile, start, slices; char uuid[96]; int pid; };
struct use { unsigned gpu, gi; int ci; };
struct hardware {
    unsigned long serial;
    int gi_count, ci_count, use_count;
    struct gi gis[ALIASES * MIG_ROOM];
    struct ci cis[ALIASES * MIG_ROOM];
    struct use uses[ALIASES * MIG_ROOM];
};

static compute_instance_t compute_instances[ALIASES * MADE_ROOM];

static void state_path(char *path, size_t size, const char *suffix)
{
    snprintf(path, size, "%s%s", getenv("FAKE_NVML_SCRIPT"), suffix);
}

static void parse_hardware(struct hardware *all, FILE *file)
{
    char line[256];
    while (file && fgets(line, sizeof line, file)) {
        struct gi gi;
        struct ci ci;
        struct use use;
        if (sscanf(line, "gi %u %u %u %u %u %d", &gi.gpu, &gi.id, &gi.profile, &gi.start, &gi.size, &gi.pid) == 6)
            all->gis[all->gi_count++] = gi;
        else if (sscanf(line, "ci %u %u %u %u %u %u %95s %d", &ci.gpu, &ci.gi, &ci.id, &ci.profile, &ci.start, &ci.slices,
                        ci.uuid, &ci.pid) == 8)
            all->cis[all->ci_count++] = ci;
        else if (sscanf(line, "use %u %u %d", &use.gpu, &use.gi, &use.ci) == 3)
            all->uses[all->use_count++] = use;
        else
            sscanf(line, "serial %lu", &all->serial);
    }
}

/* A renamed file is always a whole one: reading needs no lock. */
static struct hardware *read_hardware(void)
{
    char path[512];
    struct hardware *all = calloc(1, sizeof *all);
    state_path(path, sizeof path, ".mig");
    FILE *file = fopen(path, "r");
    parse_hardware(all, file);
    if (file)
        fclose(file);
    return all;
}

static int lock_hardware(struct hardware **all)
{
    char path[512];
    state_path(path, sizeof path, ".lock");
    int lock = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    flock(lock, LOCK_EX);
    *all = read_hardware();
    return lock;
}

static void unlock_hardware(int lock, struct hardware *all, int is_changed)
{
    char path[512], fresh[512];
    state_path(path, sizeof path, ".mig");
    state_path(fresh, sizeof fresh, ".mig.new");
    FILE *file = is_changed ? fopen(fresh, "w") : NULL;
    if (file) {
        fprintf(file, "serial %lu\n", all->serial);
        for (struct gi *gi = all->gis; gi < all->gis + all->gi_count; gi++)
            fprintf(file, "gi %u %u %u %u %u %d\n", gi->gpu, gi->id, gi->profile, gi->start, gi->size, gi->pid);
        for (struct ci *ci = all->cis; ci < all->cis + all->ci_count; ci++)
            fprintf(file, "ci %u %u %u %u %u %u %s %d\n", ci->gpu, ci->gi, ci->id, ci->profile, ci->start, ci->slices, ci->uuid,
                    ci->pid);
        for (struct use *use = all->uses; use < all->uses + all->use_count; use++)
            fprintf(file, "use %u %u %d\n", use->gpu, use->gi, use->ci);
        fclose(file);
        rename(fresh, path);
    }
    close(lock);
    free(all);
}

static struct gi *gi_of(struct hardware *all, unsigned gpu, unsigned id)
{
    for (struct gi *gi = all->gis; gi < all->gis + all->gi_count; gi++)
        if (gi->gpu == gpu && gi->id == id)
            return gi;
    return NULL;
}

static struct ci *ci_of(struct hardware *all, unsigned gpu, unsigned gi, unsigned id)
{
    for (struct ci *ci = all->cis; ci < all->cis + all->ci_count; ci++)
        if (ci->gpu == gpu && ci->gi == gi && ci->id == id)
            return ci;
    return NULL;
}

static int is_used(struct hardware *all, unsigned gpu, unsigned gi, int ci)
{
    for (struct use *use = all->uses; use < all->uses + all->use_count; use++)
        if (use->gpu == gpu && use->gi == gi && use->ci == ci)
            return 1;
    return 0;
}

/* Profiles. A wish names one by its number or, where that is GI_PROFILES, by its ID. */

static int parse_profile(const char *rest, profile_t *profile)
{
    char starts[128], name[96];
    int end = 0;
    profile_t p = {0};
    if (sscanf(rest, "%u %u %u %u %u %u %u %u %u %u %u %u %u %127s %95[^\n]%n", &p.gpu, &p.number, &p.id, &p.size, &p.slices,
               &p.count, &p.sms, &p.copy, &p.decoders, &p.encoders, &p.jpeg, &p.ofa, &p.memory_mib, starts, name, &end) != 15)
        return 0;
    for (char *left, *start = strtok_r(starts, ",", &left); start && p.places < 16; start = strtok_r(NULL, ",", &left))
        p.starts[p.places++] = (unsigned)atoi(start);
    snprintf(p.name, sizeof p.name, "%s", strcmp(name, "-") == 0 ? "" : name);
    *profile = p;
    return 1;
}

struct profile_wish { unsigned gpu, number, id; profile_t found; };
static int take_profile(const char *rest, void *wanted)
{
    struct profile_wish *wish = wanted;
    return parse_profile(rest, &wish->found) && wish->found.gpu == wish->gpu &&
           (wish->number < GI_PROFILES ? wish->found.number == wish->number : wish->found.id == wish->id);
}

/* the most that a profile of the GPU has of everything: what the GPU has */
static int take_most(const char *rest, void *wanted)
{
    profile_t *most = wanted, p;
    if (!parse_profile(rest, &p) || p.gpu != most->gpu)
        return 0;
    most->places += p.places;
    for (unsigned place = 0; place < p.places; place++)
        most->size = p.starts[place] + p.size > most->size ? p.starts[place] + p.size : most->size;
    most->decoders = p.decoders > most->decoders ? p.decoders : most->decoders;
    most->encoders = p.encoders > most->encoders ? p.encoders : most->encoders;
    most->jpeg = p.jpeg > most->jpeg ? p.jpeg : most->jpeg;
    most->ofa = p.ofa > most->ofa ? p.ofa : most->ofa;
    return 0;
}

static int has_profiles(unsigned gpu)
{
    profile_t most = {.gpu = gpu};
    find("gi_profile", take_most, &most);
    return most.places > 0;
}

static int get_profile(unsigned gpu, unsigned number, unsigned id, profile_t *profile)
{
    struct profile_wish wish = {.gpu = gpu, .number = number, .id = id};
    int is_there = find("gi_profile", take_profile, &wish);
    *profile = wish.found;
    return is_there;
}

/* Compute instance profiles: by NVML_COMPUTE_INSTANCE_PROFILE_… the number of slices; the ID is 50 more. */
static const unsigned ci_slices[] = {1, 2, 3, 4, 7, 8, 6, 0, 7};
enum { CI_PROFILES = sizeof ci_slices / sizeof *ci_slices };

/* Whether there is this compute instance profile in a GPU instance of this profile. */
static int has_ci_profile(const profile_t *profile, unsigned number)
{
    return number < CI_PROFILES && ci_slices[number] > 0 && ci_slices[number] <= profile->slices;
}

/* What comes before and after each call. */

struct fatal_wish { const char *when, *function; int nth; };
static int take_fatal(const char *rest, void *wanted)
{
    struct fatal_wish *wish = wanted;
    char when[16], function[64];
    int number;
    if (sscanf(rest, "%15s %63s %d", when, function, &number) != 3 || strcmp(function, wish->function) != 0)
        return 0;
    if (wish->nth == 0)
        wish->nth = ++fatal_calls;
    return strcmp(when, wish->when) == 0 && number == wish->nth;
}

struct slow_wish { const char *function; unsigned index; char path[256]; };
static int take_slow(const char *rest, void *wanted)
{
    struct slow_wish *wish = wanted;
    char function[64];
    unsigned index;
    return sscanf(rest, "%63s %u %255s", function, &index, wish->path) == 3 && index == wish->index &&
           strcmp(function, wish->function) == 0;
}

static __thread struct fatal_wish fatal;

static int enter(const char *function, unsigned gpu)
{
    device_t device = {gpu};
    struct slow_wish slow = {.function = function, .index = gpu};
    fatal = (struct fatal_wish){.when = "before", .function = function};
    if (find("kill", take_fatal, &fatal))
        raise(SIGKILL);
    if (find("slow", take_slow, &slow)) {
        FILE *file = fopen(slow.path, "a");
        if (file) {
            fprintf(file, "%s %u\n", function, gpu);
            fclose(file);
        }
        while (find("slow", take_slow, &slow))
            usleep(5000);
    }
    return call_error(function, &device);
}

static int leave(int code)
{
    fatal.when = "after";
    if (find("kill", take_fatal, &fatal))
        raise(SIGKILL);
    return code;
}

static int take_right(const char *rest, void *wanted)
{
    char rights[64] = "";
    sscanf(rest, "%63[^\n]", rights);
    return strstr(rights, wanted) != NULL;
}

static int may(const char *right) { return find("rights", take_right, (void *)right); }

static int is_divided(unsigned gpu)
{
    struct card_wish wish = {.index = gpu};
    return find("GPU", take_card, &wish) && wish.card.mig == 1;
}

/* MIG devices: the compute instances of a GPU that this process sees, by GPU instance and compute instance. */

static device_t *made_device(unsigned gpu, unsigned gi, unsigned ci)
{
    unsigned place = gpu % ALIASES * MADE_ROOM + gi % MIG_ROOM * MIG_ROOM + ci % MIG_ROOM;
    made_devices[place].index = MADE_BASE + place;
    return &made_devices[place];
}

static int find_made(unsigned gpu, unsigned number, device_t **instance)
{
    struct hardware *all = read_hardware();
    int sees_all = may("monitor"), is_found = 0;
    struct mig_wish wish = {.gpu = gpu};
    unsigned at = 0;
    for (unsigned place = 0; place < MADE_ROOM && !is_found; place++) {
        struct ci *ci = ci_of(all, gpu, place / MIG_ROOM, place % MIG_ROOM);
        if (!ci || !(sees_all || ci->pid == getpid()))
            continue;
        /* numbers of the script's own instances are taken */
        for (wish.number = at; find("mig", take_mig, &wish); wish.number = ++at) {}
        is_found = at++ == number;
        *instance = made_device(gpu, ci->gi, ci->id);
    }
    free(all);
    return is_found;
}

static int get_made(unsigned place, mig_t *mig)
{
    struct hardware *all = read_hardware();
    unsigned gpu = place / MADE_ROOM;
    struct ci *ci = ci_of(all, gpu, place % MADE_ROOM / MIG_ROOM, place % MIG_ROOM);
    struct gi *gi = ci ? gi_of(all, gpu, ci->gi) : NULL;
    profile_t p;
    int code = gi && is_divided(gpu) && get_profile(gpu, GI_PROFILES, gi->profile, &p) ? OK : NOT_FOUND;
    if (code == OK) {
        *mig = (mig_t){.gi = gi->id, .ci = ci->id, .memory_mib = p.memory_mib, .gi_slices = p.slices, .ci_slices = ci->slices,
                       .profile = p.number};
        mig->attributes = (attributes_t){p.sms * ci->slices / p.slices, p.copy, p.decoders, p.encoders, p.jpeg, p.ofa,
                                         p.slices, ci->slices, p.memory_mib};
        snprintf(mig->uuid, sizeof mig->uuid, "%s", ci->uuid);
    }
    free(all);
    return code;
}

/* GPU instance profiles. */

static int profile_info(device_t *device, unsigned number, profile_t *profile)
{
    if (number >= GI_PROFILES)
        return INVALID_ARGUMENT;
    /* The ID of a profile is no number of a profile: without profiles of its own it is 100 more. */
    if (!has_profiles(device->index)) {
        *profile = (profile_t){.id = 100 + number};
        return card_error(device);
    }
    return get_profile(device->index, number, 0, profile) ? OK : NOT_SUPPORTED;
}

int nvmlDeviceGetGpuInstanceProfileInfo(device_t *device, unsigned number, profile_info_t *info)
{
    profile_t p = {0};
    int code = enter(__func__, device->index);
    if (code == OK)
        code = profile_info(device, number, &p);
    *info = (profile_info_t){p.id, 0, p.slices, p.count, p.sms, p.copy, p.decoders, p.encoders, p.jpeg, p.ofa, p.memory_mib};
    return leave(code);
}

#ifndef OLD_DRIVER

int nvmlDeviceGetGpuInstanceProfileInfoV(device_t *device, unsigned number, profile_info_v2_t *info)
{
    profile_t p = {0};
    int code = enter(__func__, device->index);
    if (code == OK)
        code = profile_info(device, number, &p);
    *info = (profile_info_v2_t){info->version, p.id, 0, p.slices, p.count, p.sms, p.copy, p.decoders, p.encoders, p.jpeg, p.ofa,
                                p.memory_mib, ""};
    snprintf(info->name, sizeof info->name, "%s", p.name);
    return leave(code);
}

#endif

int nvmlDeviceGetGpuInstancePossiblePlacements_v2(device_t *device, unsigned id, placement_t *placements, unsigned *count)
{
    profile_t p = {0};
    int code = enter(__func__, device->index);
    if (code == OK && !may("config"))
        code = NO_PERMISSION;
    if (code == OK && !get_profile(device->index, GI_PROFILES, id, &p))
        code = INVALID_ARGUMENT;
    if (code == OK && placements && *count < p.places)
        code = INSUFFICIENT_SIZE;
    for (unsigned place = 0; code == OK && placements && place < p.places; place++)
        placements[place] = (placement_t){p.starts[place], p.size};
    *count = p.places;
    return leave(code);
}

/* GPU instances. */

static gpu_instance_t *gi_handle(unsigned gpu, unsigned gi)
{
    gpu_instance_t *place = &gpu_instances[gpu % ALIASES * MIG_ROOM + gi % MIG_ROOM];
    *place = (gpu_instance_t){.gpu = gpu, .gi = gi, .opening = openings};
    return place;
}

/* Its ID says how large a part of the GPU it is: the whole is 0, halves are 1 and 2, quarters 3 to 6. */
static int free_gi(struct hardware *all, unsigned gpu, unsigned size, unsigned whole)
{
    unsigned parts = 1;
    while (parts < 8 && parts * size < whole)
        parts *= 2;
    for (unsigned id = parts - 1; id < 2 * parts - 1; id++)
        if (!gi_of(all, gpu, id))
            return (int)id;
    return -1;
}

static int fits(struct hardware *all, const profile_t *wanted, unsigned start)
{
    profile_t most = {.gpu = wanted->gpu}, p;
    unsigned decoders = wanted->decoders, encoders = wanted->encoders, jpeg = wanted->jpeg, ofa = wanted->ofa, same = 1;
    find("gi_profile", take_most, &most);
    for (struct gi *gi = all->gis; gi < all->gis + all->gi_count; gi++) {
        if (gi->gpu != wanted->gpu || !get_profile(gi->gpu, GI_PROFILES, gi->profile, &p))
            continue;
        if (gi->start < start + wanted->size && start < gi->start + gi->size)
            return 0;
        same += gi->profile == wanted->id;
        decoders += p.decoders;
        encoders += p.encoders;
        jpeg += p.jpeg;
        ofa += p.ofa;
    }
    return same <= wanted->count && decoders <= most.decoders && encoders <= most.encoders && jpeg <= most.jpeg &&
           ofa <= most.ofa;
}

int nvmlDeviceCreateGpuInstanceWithPlacement(device_t *device, unsigned id, const placement_t *placement,
                                             gpu_instance_t **instance)
{
    struct hardware *all;
    profile_t p = {0}, most = {.gpu = device->index};
    int code = enter(__func__, device->index), gi = -1, is_place = 0;
    find("gi_profile", take_most, &most);
    if (code == OK && !may("config"))
        code = NO_PERMISSION;
    if (code == OK && !is_divided(device->index))
        code = NOT_SUPPORTED;
    if (code == OK && get_profile(device->index, GI_PROFILES, id, &p))
        for (unsigned place = 0; place < p.places; place++)
            is_place |= p.starts[place] == placement->start && p.size == placement->size;
    if (code == OK && !is_place)
        code = INVALID_ARGUMENT;
    if (code != OK)
        return leave(code);
    int lock = lock_hardware(&all);
    if (!fits(all, &p, placement->start) || (gi = free_gi(all, device->index, p.size, most.size)) < 0)
        code = INSUFFICIENT_RESOURCES;
    else {
        all->gis[all->gi_count++] = (struct gi){device->index, (unsigned)gi, id, placement->start, p.size, getpid()};
        *instance = gi_handle(device->index, (unsigned)gi);
    }
    unlock_hardware(lock, all, code == OK);
    return leave(code);
}

int nvmlDeviceGetGpuInstances(device_t *device, unsigned id, gpu_instance_t **found, unsigned *count)
{
    int code = enter(__func__, device->index), exist = 0;
    struct hardware *all = read_hardware();
    *count = 0;
    if (code == OK && !is_divided(device->index))
        code = NOT_SUPPORTED;
    if (code == OK && !found)
        code = INVALID_ARGUMENT;
    for (struct gi *gi = all->gis; gi < all->gis + all->gi_count; gi++)
        exist |= gi->gpu == device->index;
    /* of a GPU without instances everybody may know that */
    if (code == OK && exist && !may("config"))
        code = NO_PERMISSION;
    for (struct gi *gi = all->gis; code == OK && gi < all->gis + all->gi_count; gi++)
        if (gi->gpu == device->index && gi->profile == id)
            found[(*count)++] = gi_handle(gi->gpu, gi->id);
    free(all);
    return leave(code);
}

static int get_scripted(unsigned gpu, unsigned gi, mig_t *mig)
{
    for (unsigned number = 0; number < MIG_MAX; number++) {
        struct mig_wish wish = {.gpu = gpu, .number = number};
        if (find("mig", take_mig, &wish) && wish.mig.gi == gi) {
            *mig = wish.mig;
            return 1;
        }
    }
    return 0;
}

int nvmlDeviceGetGpuInstanceById(device_t *device, unsigned gi, gpu_instance_t **instance)
{
    int code = enter(__func__, device->index);
    struct hardware *all = read_hardware();
    mig_t mig;
    if (code == OK && !is_divided(device->index))
        code = NOT_SUPPORTED;
    if (code == OK && !get_scripted(device->index, gi, &mig)) {
        if (!may("config") && !may("monitor"))
            code = NO_PERMISSION;
        else if (!gi_of(all, device->index, gi))
            code = NOT_FOUND;
    }
    *instance = gi_handle(device->index, gi);
    free(all);
    return leave(code);
}

int nvmlGpuInstanceGetInfo(gpu_instance_t *instance, gpu_instance_info_t *info)
{
    int code = enter(__func__, instance->gpu);
    struct hardware *all = read_hardware();
    struct gi *gi = gi_of(all, instance->gpu, instance->gi);
    mig_t mig;
    if (code == OK && instance->opening != openings)
        code = INVALID_ARGUMENT;
    if (code == OK && gi)
        *info = (gpu_instance_info_t){&devices[gi->gpu % ALIASES], gi->id, gi->profile, gi->start, gi->size};
    else if (code == OK && get_scripted(instance->gpu, instance->gi, &mig))
        *info = (gpu_instance_info_t){.id = instance->gi, .profile = 100 + mig.profile};
    else if (code == OK)
        code = INVALID_ARGUMENT;
    free(all);
    return leave(code);
}

int nvmlGpuInstanceDestroy(gpu_instance_t *instance)
{
    struct hardware *all;
    int code = enter(__func__, instance->gpu);
    if (code == OK && !may("config"))
        code = NO_PERMISSION;
    if (code != OK)
        return leave(code);
    int lock = lock_hardware(&all);
    struct gi *gi = instance->opening == openings ? gi_of(all, instance->gpu, instance->gi) : NULL;
    if (!gi)
        code = INVALID_ARGUMENT;
    else if (is_used(all, gi->gpu, gi->id, -1))
        code = IN_USE;
    for (struct ci *ci = all->cis; code == OK && ci < all->cis + all->ci_count; ci++)
        if (ci->gpu == gi->gpu && ci->gi == gi->id)
            code = IN_USE;
    if (code == OK)
        *gi = all->gis[--all->gi_count];
    unlock_hardware(lock, all, code == OK);
    return leave(code);
}

/* Compute instances. */

static int profile_of(gpu_instance_t *instance, profile_t *profile)
{
    struct hardware *all = read_hardware();
    struct gi *gi = instance->opening == openings ? gi_of(all, instance->gpu, instance->gi) : NULL;
    int is_there = gi && get_profile(gi->gpu, GI_PROFILES, gi->profile, profile);
    free(all);
    return is_there ? OK : INVALID_ARGUMENT;
}

static int ci_profile_info(gpu_instance_t *instance, unsigned number, unsigned engine, ci_profile_info_t *info, char *name)
{
    profile_t p = {0};
    int code = profile_of(instance, &p);
    if (code == OK && (number >= CI_PROFILES || engine != 0))
        code = INVALID_ARGUMENT;
    if (code == OK && !has_ci_profile(&p, number))
        code = NOT_SUPPORTED;
    if (code != OK)
        return code;
    unsigned slices = ci_slices[number];
    *info = (ci_profile_info_t){50 + number, slices, p.slices / slices, p.sms * slices / p.slices, p.copy, p.decoders,
                                p.encoders, p.jpeg, p.ofa};
    if (slices == p.slices)
        snprintf(name, 96, "%s", p.name);
    else
        snprintf(name, 96, "MIG %uc.%s", slices, p.name + (strncmp(p.name, "MIG ", 4) == 0 ? 4 : 0));
    return OK;
}

int nvmlGpuInstanceGetComputeInstanceProfileInfo(gpu_instance_t *instance, unsigned number, unsigned engine,
                                                 ci_profile_info_t *info)
{
    char name[96];
    int code = enter(__func__, instance->gpu);
    return leave(code != OK ? code : ci_profile_info(instance, number, engine, info, name));
}

#ifndef OLD_DRIVER

int nvmlGpuInstanceGetComputeInstanceProfileInfoV(gpu_instance_t *instance, unsigned number, unsigned engine,
                                                  ci_profile_info_v2_t *info)
{
    int code = enter(__func__, instance->gpu);
    return leave(code != OK ? code : ci_profile_info(instance, number, engine, &info->info, info->name));
}

#endif

static compute_instance_t *ci_handle(unsigned gpu, unsigned gi, unsigned ci)
{
    compute_instance_t *place = &compute_instances[gpu % ALIASES * MADE_ROOM + gi % MIG_ROOM * MIG_ROOM + ci % MIG_ROOM];
    *place = (compute_instance_t){.gpu = gpu, .gi = gi, .ci = ci, .opening = openings};
    return place;
}

int nvmlGpuInstanceCreateComputeInstance(gpu_instance_t *instance, unsigned id, compute_instance_t **made)
{
    struct hardware *all;
    profile_t p = {0};
    unsigned taken = 0, free_id = 0, number = id - 50;
    int code = enter(__func__, instance->gpu);
    if (code == OK && !may("config"))
        code = NO_PERMISSION;
    if (code == OK)
        code = profile_of(instance, &p);
    if (code == OK && !has_ci_profile(&p, number))
        code = NOT_SUPPORTED;
    if (code != OK)
        return leave(code);
    int lock = lock_hardware(&all);
    for (struct ci *ci = all->cis; ci < all->cis + all->ci_count; ci++)
        taken |= ci->gpu == instance->gpu && ci->gi == instance->gi ? ((1u << ci->slices) - 1) << ci->start : 0;
    while (ci_of(all, instance->gpu, instance->gi, free_id))
        free_id++;
    unsigned start = 0, slices = ci_slices[number], wanted = (1u << slices) - 1;
    while (start + slices <= p.slices && taken & wanted << start)
        start++;
    if (!gi_of(all, instance->gpu, instance->gi))
        code = INVALID_ARGUMENT;
    else if (start + slices > p.slices)
        code = INSUFFICIENT_RESOURCES;
    else {
        struct ci *ci = &all->cis[all->ci_count++];
        *ci = (struct ci){instance->gpu, instance->gi, free_id, id, start, slices, "", getpid()};
        snprintf(ci->uuid, sizeof ci->uuid, "MIG-%08lx-%04x-5000-8000-0000000000%02x", ++all->serial, instance->gpu, instance->gi);
        *made = ci_handle(ci->gpu, ci->gi, ci->id);
    }
    unlock_hardware(lock, all, code == OK);
    return leave(code);
}

int nvmlGpuInstanceGetComputeInstances(gpu_instance_t *instance, unsigned id, compute_instance_t **found, unsigned *count)
{
    int code = enter(__func__, instance->gpu);
    struct hardware *all = read_hardware();
    profile_t p = {0};
    *count = 0;
    if (code == OK && !may("config"))
        code = NO_PERMISSION;
    if (code == OK)
        code = found ? profile_of(instance, &p) : INVALID_ARGUMENT;
    if (code == OK && !has_ci_profile(&p, id - 50))
        code = NOT_SUPPORTED;
    for (struct ci *ci = all->cis; code == OK && ci < all->cis + all->ci_count; ci++)
        if (ci->gpu == instance->gpu && ci->gi == instance->gi && ci->profile == id)
            found[(*count)++] = ci_handle(ci->gpu, ci->gi, ci->id);
    free(all);
    return leave(code);
}

int nvmlGpuInstanceGetComputeInstanceById(gpu_instance_t *instance, unsigned id, compute_instance_t **found)
{
    int code = enter(__func__, instance->gpu);
    struct hardware *all = read_hardware();
    if (code == OK && !may("config"))
        code = NO_PERMISSION;
    if (code == OK && instance->opening != openings)
        code = INVALID_ARGUMENT;
    if (code == OK && !ci_of(all, instance->gpu, instance->gi, id))
        code = NOT_FOUND;
    *found = ci_handle(instance->gpu, instance->gi, id);
    free(all);
    return leave(code);
}

int nvmlComputeInstanceGetInfo_v2(compute_instance_t *instance, ci_info_t *info)
{
    int code = enter(__func__, instance->gpu);
    struct hardware *all = read_hardware();
    struct ci *ci = instance->opening == openings ? ci_of(all, instance->gpu, instance->gi, instance->ci) : NULL;
    if (code == OK && !ci)
        code = INVALID_ARGUMENT;
    if (code == OK)
        *info = (ci_info_t){made_device(ci->gpu, ci->gi, ci->id), gi_handle(ci->gpu, ci->gi), ci->id, ci->profile,
                            {ci->start, ci->slices}};
    if (code == OK && find("ci_device", take_any, NULL))
        info->device = &devices[ci->gpu % ALIASES];
    free(all);
    return leave(code);
}

int nvmlComputeInstanceDestroy(compute_instance_t *instance)
{
    struct hardware *all;
    int code = enter(__func__, instance->gpu);
    if (code == OK && !may("config"))
        code = NO_PERMISSION;
    if (code != OK)
        return leave(code);
    int lock = lock_hardware(&all);
    struct ci *ci = instance->opening == openings ? ci_of(all, instance->gpu, instance->gi, instance->ci) : NULL;
    if (!ci)
        code = INVALID_ARGUMENT;
    else if (is_used(all, ci->gpu, ci->gi, (int)ci->id))
        code = IN_USE;
    else
        *ci = all->cis[--all->ci_count];
    unlock_hardware(lock, all, code == OK);
    return leave(code);
}

/* What NVIDIA's Go binding calls in addition to the names above: the benchmark runs other device plugins on this library. */
int nvmlInit(void) { return nvmlInitWithFlags(0); }
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

int nvmlDeviceGetHandleByUUID(const char *uuid, device_t **device)
{
    unsigned count = 0;
    char found[96];
    int code = nvmlDeviceGetCount_v2(&count);
    for (unsigned index = 0; code == OK && index < count; index++)
        if (nvmlDeviceGetHandleByIndex_v2(index, device) == OK && nvmlDeviceGetUUID(*device, found, sizeof found) == OK &&
            strcmp(found, uuid) == 0)
            return OK;
    return code != OK ? code : NOT_FOUND;
}

int nvmlDeviceIsMigDeviceHandle(device_t *device, unsigned *is_mig)
{
    *is_mig = device->index >= MIG_BASE;
    return OK;
}

int nvmlDeviceGetAddressingMode(device_t *device, addressing_t *mode)
{
    return get_number(__func__, device, "addressing", &mode->value);
}

int nvmlDeviceGetNumaNodeId(device_t *device, unsigned *node) { return get_number(__func__, device, "numa_node", node); }

/* Events. */
#ifndef NO_EVENTS

static unsigned long long registered[64];
static int delivered, in_set;

struct event_wish { int after, number, device; unsigned long long type, data; unsigned gi, ci; };

/* finds the lowest number above `after` */
static int take_event(const char *rest, void *wanted)
{
    struct event_wish *wish = wanted;
    int number, device;
    unsigned long long type, data;
    unsigned gi = ~0u, ci = ~0u;
    if (sscanf(rest, "%d %d %llu %llu %u %u", &number, &device, &type, &data, &gi, &ci) < 4)
        return 0;
    if (number > wish->after && (wish->number == 0 || number < wish->number))
        *wish = (struct event_wish){wish->after, number, device, type, data, gi, ci};
    return 0;
}

static struct event_wish next_event(void)
{
    struct event_wish wish = {.after = delivered};
    find("event", take_event, &wish);
    return wish;
}

int nvmlEventSetCreate(void **set)
{
    int code = driver_error();
    if (code != OK)
        return code;
    memset(registered, 0, sizeof registered);
    for (struct event_wish event; (event = next_event()).number != 0;)
        delivered = event.number;
    in_set = 1;
    *set = &in_set;
    note("event_set");
    return OK;
}

int nvmlEventSetFree(void *set)
{
    (void)set;
    in_set = 0;
    note("event_set_free");
    return driver_error();
}

int nvmlDeviceGetSupportedEventTypes(device_t *device, unsigned long long *types)
{
    int numbers[2] = {(int)device->index, 10}, code = call_error(__func__, device);
    find("event_types", take_code, numbers);
    *types = (unsigned long long)numbers[1];
    return code;
}

int nvmlDeviceRegisterEvents(device_t *device, unsigned long long types, void *set)
{
    int code = call_error(__func__, device);
    (void)set;
    if (code == OK)
        registered[device->index % ALIASES] = types;
    return code;
}

/* Until a file is moved into the script's directory, at most this long: events end a wait, as the driver's do. */
static void await_script(long timeout_ms)
{
    static int moves = -1;
    char directory[256], changes[4096];
    pthread_mutex_lock(&guard);
    if (moves < 0) {
        snprintf(directory, sizeof directory, "%s", getenv("FAKE_NVML_SCRIPT"));
        moves = inotify_init1(IN_NONBLOCK | IN_CLOEXEC);
        inotify_add_watch(moves, dirname(directory), IN_MOVED_TO);
    }
    pthread_mutex_unlock(&guard);
    struct pollfd wanted = {.fd = moves, .events = POLLIN};
    if (poll(&wanted, 1, (int)timeout_ms) > 0 && read(moves, changes, sizeof changes) < 0)
        usleep(1000); /* taken by another thread */
}

static long now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

int nvmlEventSetWait_v2(void *set, event_t *event, unsigned timeout_ms)
{
    int code = driver_error();
    if (code != OK || set != &in_set || !in_set)
        return code != OK ? code : INVALID_ARGUMENT;
    for (long until = now_ms() + timeout_ms, left = timeout_ms; left >= 0; left = until - now_ms()) {
        for (struct event_wish wish; (wish = next_event()).number != 0;) {
            delivered = wish.number;
            if (wish.device >= 0 && !(registered[wish.device % ALIASES] & wish.type))
                continue;
            *event = (event_t){wish.device < 0 ? NULL : &devices[wish.device], wish.type, wish.data, wish.gi, wish.ci};
            return OK;
        }
        if (find("wait", take_int, &code))
            return code;
        if (left > 1)
            note_in("waits", "waits");
        await_script(left + 1);
    }
    return TIMEOUT;
}

#endif
