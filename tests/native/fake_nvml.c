/* A stand-in for libnvidia-ml.so.1, as far as this project calls it.
 *
 * It holds no state of its own but "initialised": every call reads the script that FAKE_NVML_SCRIPT names, so a test
 * changes the machine by replacing that file. Lines of the script, in any order:
 *
 *   init CODE                        nvmlInit answers CODE (default 0)
 *   driver CODE                      every call but init and shutdown answers CODE
 *   hang                             nvmlDeviceGetCount does not return while this line is there
 *   count N
 *   card I UUID MINOR BUS_ID MEMORY_MIB MIG NAME...
 *   handle_error I CODE              the card at index I has no handle
 *   error I CODE                     UUID can be read, everything else of the card answers CODE
 *   ancestor I J LEVEL               default 50 (SYSTEM)
 *   nvlink I LINK REMOTE_TYPE BUS_ID an active link
 *   log PATH                         appends the name of each init and shutdown to PATH
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OK = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6 };

typedef struct { unsigned index; } device_t;
typedef struct {
    char busIdLegacy[16];
    unsigned domain, bus, device, pciDeviceId, pciSubSystemId;
    char busId[32];
} pci_t;
typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned minor, memory_mib, mig; char uuid[96], bus_id[32], name[96]; } card_t;

static device_t devices[64];
static int initialised;

/* Calls `use` with each line that begins with `key`; stops at the first line that it accepts. */
static int find(const char *key, int (*use)(const char *rest, void *wanted), void *wanted)
{
    char line[512], word[32];
    int used, found = 0;
    FILE *script = fopen(getenv("FAKE_NVML_SCRIPT"), "r");
    if (!script)
        return 0;
    while (!found && fgets(line, sizeof line, script))
        if (sscanf(line, "%31s%n", word, &used) == 1 && strcmp(word, key) == 0)
            found = use(line + used, wanted);
    fclose(script);
    return found;
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

static void note(const char *what)
{
    char path[256];
    FILE *log;
    if (find("log", take_text, path) && (log = fopen(path, "a"))) {
        fprintf(log, "%s\n", what);
        fclose(log);
    }
}

static int driver_error(void)
{
    int code = OK;
    if (!initialised)
        return UNINITIALIZED;
    find("driver", take_int, &code);
    return code;
}

static int card_error(device_t *device)
{
    int numbers[2] = {(int)device->index, OK}, code = driver_error();
    if (code == OK)
        find("error", take_code, numbers);
    return code != OK ? code : numbers[1];
}

static int get_card(device_t *device, card_t *card)
{
    struct card_wish wish = {.index = device->index};
    int code = card_error(device);
    if (code == OK && !find("card", take_card, &wish))
        code = NOT_FOUND;
    *card = wish.card;
    return code;
}

static int get_link(device_t *device, unsigned link, struct link_wish *wish)
{
    int code = card_error(device);
    wish->index = device->index;
    wish->link = link;
    return code != OK ? code : find("nvlink", take_link, wish) ? OK : NOT_SUPPORTED;
}

int nvmlInitWithFlags(unsigned flags)
{
    int code = OK;
    (void)flags;
    find("init", take_int, &code);
    if (code == OK)
        initialised = 1;
    note("init");
    return code;
}

int nvmlShutdown(void)
{
    int code = initialised ? OK : UNINITIALIZED;
    initialised = 0;
    note("shutdown");
    return code;
}

const char *nvmlErrorString(int code) { (void)code; return "scripted error"; }

int nvmlDeviceGetCount_v2(unsigned *count)
{
    while (find("hang", take_any, NULL))
        usleep(5000);
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
    devices[index % 64].index = index;
    *device = &devices[index % 64];
    return code != OK ? code : numbers[1];
}

int nvmlDeviceGetUUID(device_t *device, char *text, unsigned size)
{
    struct card_wish wish = {.index = device->index};
    int code = driver_error();
    if (code == OK && !find("card", take_card, &wish))
        return NOT_FOUND;
    snprintf(text, size, "%s", wish.card.uuid);
    return code;
}

int nvmlDeviceGetName(device_t *device, char *text, unsigned size)
{
    card_t card = {0};
    int code = get_card(device, &card);
    snprintf(text, size, "%s", card.name);
    return code;
}

int nvmlSystemGetDriverVersion(char *text, unsigned size)
{
    snprintf(text, size, "580.1.2");
    return driver_error();
}

int nvmlDeviceGetMinorNumber(device_t *device, unsigned *minor)
{
    card_t card = {0};
    int code = get_card(device, &card);
    *minor = card.minor;
    return code;
}

int nvmlDeviceGetMemoryInfo(device_t *device, memory_t *memory)
{
    card_t card = {0};
    int code = get_card(device, &card);
    memory->total = memory->free = card.memory_mib * 1024ULL * 1024ULL;
    memory->used = 0;
    return code;
}

int nvmlDeviceGetMigMode(device_t *device, unsigned *current, unsigned *pending)
{
    card_t card = {0};
    int code = get_card(device, &card);
    *current = *pending = card.mig;
    return code;
}

int nvmlDeviceGetPciInfo_v3(device_t *device, pci_t *pci)
{
    card_t card = {0};
    int code = get_card(device, &card);
    snprintf(pci->busId, sizeof pci->busId, "%s", card.bus_id);
    return code;
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
