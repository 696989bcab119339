/* A stand-in for libnvidia-ml.so.1, as far as the compute mode goes: two cards, whose modes are the two digits in the file
 * that FAKE_NVML_MODES names; an x is of a card that does not answer. With FAKE_NVML_DENIES the setter answers "no permission".
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, INVALID_ARGUMENT = 2, NO_PERMISSION = 4, UNKNOWN = 999 };

static int cards[2] = { 0, 1 };
static const char *uuids[2] = { "GPU-aaaa", "GPU-bbbb" };

static int read_modes(char *modes)
{
    FILE *file = fopen(getenv("FAKE_NVML_MODES"), "r");
    int found = file != NULL && fread(modes, 1, 2, file) == 2;
    if (file != NULL)
        fclose(file);
    return found;
}

int nvmlInitWithFlags(unsigned flags) { (void) flags; return OK; }
int nvmlInit_v2(void) { return OK; }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) { return code == NO_PERMISSION ? "Insufficient Permissions" : "An Error"; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return OK; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, int **card)
{
    if (index > 1)
        return INVALID_ARGUMENT;
    *card = &cards[index];
    return OK;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, int **card)
{
    int index;
    for (index = 0; index < 2; index++)
        if (strcmp(uuid, uuids[index]) == 0)
            return nvmlDeviceGetHandleByIndex_v2(index, card);
    return INVALID_ARGUMENT;
}

int nvmlDeviceGetUUID(int *card, char *uuid, unsigned size)
{
    snprintf(uuid, size, "%s", uuids[*card]);
    return OK;
}

int nvmlDeviceGetComputeMode(int *card, int *mode)
{
    char modes[2];
    if (!read_modes(modes) || modes[*card] == 'x')
        return UNKNOWN;
    *mode = modes[*card] - '0';
    return OK;
}

int nvmlDeviceSetComputeMode(int *card, int mode)
{
    char modes[2];
    FILE *file;
    if (!read_modes(modes))
        return UNKNOWN;
    if (getenv("FAKE_NVML_DENIES") != NULL)
        return NO_PERMISSION;
    modes[*card] = '0' + mode;
    file = fopen(getenv("FAKE_NVML_MODES"), "w");
    fwrite(modes, 1, 2, file);
    fclose(file);
    return OK;
}
