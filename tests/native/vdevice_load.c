/* A container that registers and forks again and again, as little as a GPU job does of it costs: 50 of them run next to one
 * another in a test. By name and, where the cgroup tells the container's ID, by ID in turn. A child lives for a moment.
 *
 * Environment: GPUSHARE_VDEVICE, the path <root>/<pod uid>/<container>/vcuda.sock; GPUSHARE_QUIET, a file at whose sight it
 * stops registering, prints how many registrations were answered OK, and waits with one child for its end. */
#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

enum { ID_CHARS = 64, CHILD_US = 60000, PAUSE_US = 250000 };
enum { POD_UID_TAG = 2 << 3 | 2, CONTAINER_NAME_TAG = 3 << 3 | 2, CONTAINER_ID_TAG = 4 << 3 | 2 };

static unsigned char request[1024];
static size_t size;

static void add(const void *content, size_t length) {
    memcpy(request + size, content, length);
    size += length;
}

static void add_text(int tag, const char *text) { /* a length of one byte: at most 127 */
    unsigned char head[2] = {(unsigned char)tag, (unsigned char)strlen(text)};
    add(head, 2);
    add(text, strlen(text));
}

static void add_frame_head(size_t length, int kind, int flags, int stream) {
    unsigned char head[9] = {0, (unsigned char)(length >> 8), (unsigned char)length, (unsigned char)kind,
                             (unsigned char)flags, 0, 0, 0, (unsigned char)stream};
    add(head, 9);
}

static void header(char *block, size_t *at, const char *name, const char *value) { /* literal, never in a table */
    block[(*at)++] = 0;
    block[(*at)++] = (char)strlen(name);
    *at += (size_t)sprintf(block + *at, "%s", name);
    block[(*at)++] = (char)strlen(value);
    *at += (size_t)sprintf(block + *at, "%s", value);
}

static void make_request(const char *uid, const char *name, const char *id) {
    char block[256] = "\x83\x86"; /* :method POST, :scheme http */
    size_t at = 2, message;
    header(block, &at, ":path", "/vcuda.VCUDAService/RegisterVDevice");
    header(block, &at, ":authority", "x");
    header(block, &at, "te", "trailers");
    header(block, &at, "content-type", "application/grpc");
    size = 0;
    add("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 24);
    add_frame_head(0, 4, 0, 0);
    add_frame_head(at, 1, 4, 1);
    add(block, at);
    message = 2 + strlen(uid) + 2 + (id ? strlen(id) : strlen(name));
    add_frame_head(5 + message, 0, 1, 1);
    unsigned char prefix[5] = {0, 0, 0, (unsigned char)(message >> 8), (unsigned char)message};
    add(prefix, 5);
    add_text(POD_UID_TAG, uid);
    if (id)
        add_text(CONTAINER_ID_TAG, id);
    else
        add_text(CONTAINER_NAME_TAG, name);
}

/* 1: OK, which alone comes with a DATA frame; 0: another answer, or none. */
static int call(const char *path) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct timeval patience = {.tv_sec = 2};
    unsigned char answer[4096];
    size_t have = 0;
    int is_ok = 0, is_over = 0, sock = socket(AF_UNIX, SOCK_STREAM, 0);
    if (sock < 0)
        return 0;
    strncpy(address.sun_path, path, sizeof address.sun_path - 1);
    setsockopt(sock, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    if (connect(sock, (struct sockaddr *)&address, sizeof address) == 0 && write(sock, request, size) == (ssize_t)size)
        while (!is_over) {
            ssize_t got = read(sock, answer + have, sizeof answer - have);
            if (got <= 0)
                break;
            have += (size_t)got;
            while (have >= 9) {
                size_t whole = 9 + ((size_t)answer[0] << 16 | (size_t)answer[1] << 8 | answer[2]);
                if (whole > sizeof answer || have < whole)
                    break;
                is_ok |= answer[3] == 0;
                is_over |= answer[3] <= 1 && (answer[4] & 1);
                memmove(answer, answer + whole, have -= whole);
            }
        }
    close(sock);
    return is_ok && is_over;
}

static const char *own_id(void) {
    static char line[4096];
    FILE *file = fopen("/proc/self/cgroup", "r");
    const char *found = NULL;
    while (file && !found && fgets(line, sizeof line, file)) {
        size_t length = strcspn(line, "\n");
        line[length] = 0;
        if (strstr(line, "/kubepods/") && length > ID_CHARS)
            found = line + length - ID_CHARS;
    }
    if (file)
        fclose(file);
    return found;
}

static void fork_child(useconds_t lives_us) {
    if (fork() == 0) {
        if (lives_us)
            usleep(lives_us);
        else
            pause();
        _exit(0);
    }
}

int main(void) {
    const char *path = getenv("GPUSHARE_VDEVICE"), *quiet = getenv("GPUSHARE_QUIET"), *id = own_id();
    char copy[512], *uid, *name;
    unsigned count = 0, ok = 0;
    if (!path || !quiet || strlen(path) >= sizeof copy)
        return 2;
    strcpy(copy, path);
    *strrchr(copy, '/') = 0;
    name = strrchr(copy, '/') + 1;
    name[-1] = 0;
    uid = strrchr(copy, '/') + 1;
    signal(SIGCHLD, SIG_IGN);
    srand((unsigned)getpid());
    while (access(quiet, F_OK) != 0) {
        fork_child(CHILD_US + (useconds_t)(rand() % CHILD_US));
        make_request(uid, name, count++ % 2 ? id : NULL);
        ok += (unsigned)call(path);
        usleep(PAUSE_US + (useconds_t)(rand() % PAUSE_US));
    }
    fork_child(0);
    printf("ok=%u\n", ok);
    fflush(stdout);
    for (;;)
        pause();
}
