/* RegisterVDevice over HTTP/2 (RFC 9113, header compression RFC 7541) on a unix socket: docs/reference/vdevice.md.
 *
 * The connection begins with SETTINGS_HEADER_TABLE_SIZE 0, so that answers refer to no table of earlier headers. What an answer
 * may cost is bounded: the caller's time, ATTEMPT_BYTES, frames and header blocks of 16 KiB, no allocation.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "vdevice.h"

#include <errno.h>
#include <poll.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { ATTEMPT_BYTES = 256 * 1024, FRAME_BYTES = 16384, FRAME_HEAD = 9, NAME_BYTES = 32, VALUE_BYTES = 512, STREAM = 1 };
enum frame { DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION };
enum { END_STREAM = 1, ACK = 1, END_HEADERS = 4, PADDED = 8, HAS_PRIORITY = 32 };
struct connection {
    int fd;
    int64_t deadline_ms;
    size_t received;
    uint8_t frame[FRAME_BYTES];
    uint8_t block[FRAME_BYTES]; /* of a header block the frames so far */
    size_t block_size;
    int status; /* grpc-status; -1 while it has not come */
    char text[VALUE_BYTES]; /* grpc-message */
};

char vdevice_problem[1024];

static void set_problem(const char *format, ...) __attribute__((format(printf, 1, 2)));

static void set_problem(const char *format, ...)
{
    va_list values;
    va_start(values, format);
    vsnprintf(vdevice_problem, sizeof vdevice_problem, format, values);
    va_end(values);
}

static int64_t now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* ---- Header compression, RFC 7541 ---- */

/* Appendix B's code is canonical: HUFFMAN_COUNTS has the number of codes of each length in bits, HUFFMAN_SYMBOLS the symbols in
 * the codes' order. The last code, end of string, is none that a text may hold. */
static const uint8_t HUFFMAN_COUNTS[31] = {
    0, 0, 0, 0, 0, 10, 26, 32, 6, 0, 5, 3, 2, 6, 2, 3, 0, 0, 0, 3, 8, 13, 26, 29, 12, 4, 15, 19, 29, 0, 4
};
static const uint8_t HUFFMAN_SYMBOLS[256] = {
    48, 49, 50, 97, 99, 101, 105, 111, 115, 116, 32, 37, 45, 46, 47, 51, 52, 53, 54, 55, 56, 57, 61, 65, 95, 98, 100,
    102, 103, 104, 108, 109, 110, 112, 114, 117, 58, 66, 67, 68, 69, 70, 71, 72, 73, 74, 75, 76, 77, 78, 79, 80, 81, 82,
    83, 84, 85, 86, 87, 89, 106, 107, 113, 118, 119, 120, 121, 122, 38, 42, 44, 59, 88, 90, 33, 34, 40, 41, 63, 39, 43,
    124, 35, 62, 0, 36, 64, 91, 93, 126, 94, 125, 60, 96, 123, 92, 195, 208, 128, 130, 131, 162, 184, 194, 224, 226,
    153, 161, 167, 172, 176, 177, 179, 209, 216, 217, 227, 229, 230, 129, 132, 133, 134, 136, 146, 154, 156, 160, 163,
    164, 169, 170, 173, 178, 181, 185, 186, 187, 189, 190, 196, 198, 228, 232, 233, 1, 135, 137, 138, 139, 140, 141,
    143, 147, 149, 150, 151, 152, 155, 157, 158, 165, 166, 168, 174, 175, 180, 182, 183, 188, 191, 197, 231, 239, 9,
    142, 144, 145, 148, 159, 171, 206, 215, 225, 236, 237, 199, 207, 234, 235, 192, 193, 200, 201, 202, 205, 210, 213,
    218, 219, 238, 240, 242, 243, 255, 203, 204, 211, 212, 214, 221, 222, 223, 241, 244, 245, 246, 247, 248, 250, 251,
    252, 253, 254, 2, 3, 4, 5, 6, 7, 8, 11, 12, 14, 15, 16, 17, 18, 19, 20, 21, 23, 24, 25, 26, 27, 28, 29, 30, 31, 127,
    220, 249, 10, 13, 22
};

struct reader { const uint8_t *at, *end; };

/* An integer with a prefix of `bits` bits; false where it does not end or is over 2^20. */
static bool read_integer(struct reader *in, int bits, uint32_t *value)
{
    if (in->at == in->end)
        return false;
    uint32_t most = (1u << bits) - 1;
    *value = *in->at++ & most;
    if (*value < most)
        return true;
    for (int shift = 0; shift <= 14; shift += 7) {
        if (in->at == in->end)
            return false;
        uint8_t byte = *in->at++;
        *value += (uint32_t)(byte & 0x7f) << shift;
        if (!(byte & 0x80))
            return *value < 1u << 20;
    }
    return false;
}

/* Appends to a text that may be cut short. */
static void put(char *text, size_t size, size_t *length, uint8_t byte)
{
    if (*length + 1 < size)
        text[(*length)++] = (char)byte;
}

static bool decode_huffman(const uint8_t *at, const uint8_t *end, char *text, size_t size, size_t *length)
{
    uint32_t code = 0, first = 0, index = 0;
    int bits = 0;
    for (; at < end; at++)
        for (int bit = 7; bit >= 0; bit--) {
            code |= *at >> bit & 1;
            if (++bits > 30)
                return false;
            uint32_t count = HUFFMAN_COUNTS[bits];
            if (code - first < count) {
                index += code - first;
                if (index >= sizeof HUFFMAN_SYMBOLS)
                    return false;
                put(text, size, length, HUFFMAN_SYMBOLS[index]);
                code = first = index = 0;
                bits = 0;
                continue;
            }
            index += count;
            first = (first + count) << 1;
            code <<= 1;
        }
    return bits < 8; /* what is left over is padding */
}

static bool read_text(struct reader *in, char *text, size_t size)
{
    bool is_huffman = in->at < in->end && *in->at & 0x80;
    uint32_t length;
    size_t written = 0;
    if (!read_integer(in, 7, &length) || length > (size_t)(in->end - in->at))
        return false;
    const uint8_t *at = in->at;
    in->at += length;
    if (is_huffman && !decode_huffman(at, in->at, text, size, &written))
        return false;
    for (; !is_huffman && at < in->at; at++)
        put(text, size, &written, *at);
    text[written] = 0;
    return true;
}

/* One literal field; of a name from the static table only the value is read, for none of those names is of interest. */
static bool read_field(struct connection *to, struct reader *in, int prefix_bits)
{
    uint32_t index;
    char name[NAME_BYTES] = "", value[VALUE_BYTES];
    if (!read_integer(in, prefix_bits, &index) || index > 61 || (index == 0 && !read_text(in, name, sizeof name)) ||
        !read_text(in, value, sizeof value))
        return false;
    if (!strcmp(name, "grpc-status")) {
        char *end;
        long status = strtol(value, &end, 10);
        if (end == value || *end || status < 0 || status > 999)
            return false;
        to->status = (int)status;
    } else if (!strcmp(name, "grpc-message"))
        memcpy(to->text, value, sizeof to->text);
    return true;
}

/* Reads the whole header block of `to`; false where it is malformed or needs a table, which we announced to be empty. */
static bool read_block(struct connection *to)
{
    struct reader in = {to->block, to->block + to->block_size};
    uint32_t number;
    while (in.at < in.end) {
        uint8_t first = *in.at;
        bool is_read;
        if (first & 0x80) /* an indexed field */
            is_read = read_integer(&in, 7, &number) && number >= 1 && number <= 61;
        else if (first & 0x40) /* a literal, to be remembered: in a table without room that is no instruction */
            is_read = read_field(to, &in, 6);
        else if (first & 0x20) /* the table's new size */
            is_read = read_integer(&in, 5, &number) && number == 0;
        else
            is_read = read_field(to, &in, 4);
        if (!is_read)
            return false;
    }
    return true;
}

static size_t put_text(uint8_t *to, const char *text) /* of at most 126 bytes */
{
    size_t length = strlen(text);
    to[0] = (uint8_t)length;
    memcpy(to + 1, text, length);
    return 1 + length;
}

/* ---- HTTP/2 frames, RFC 9113 ---- */

/* Waits until the socket is ready for `events`; false at the deadline. */
static bool wait_ready(const struct connection *on, short events)
{
    struct pollfd one = {.fd = on->fd, .events = events};
    for (;;) {
        int64_t left_ms = on->deadline_ms - now_ms();
        if (left_ms <= 0) {
            set_problem("there was no answer in time");
            return false;
        }
        int ready = poll(&one, 1, (int)left_ms);
        if (ready > 0)
            return true;
        if (ready < 0 && errno != EINTR) {
            set_problem("poll: %s", strerror(errno));
            return false;
        }
    }
}

static bool send_all(const struct connection *on, const uint8_t *at, size_t size)
{
    while (size) {
        if (!wait_ready(on, POLLOUT))
            return false;
        ssize_t sent = send(on->fd, at, size, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent < 0 && errno != EINTR && errno != EAGAIN) {
            set_problem("the agent closed the connection (%s)", strerror(errno));
            return false;
        }
        if (sent > 0) {
            at += sent;
            size -= (size_t)sent;
        }
    }
    return true;
}

static bool receive_all(struct connection *on, uint8_t *at, size_t size)
{
    if ((on->received += size) > ATTEMPT_BYTES) {
        set_problem("the answer is over %d bytes", ATTEMPT_BYTES);
        return false;
    }
    while (size) {
        if (!wait_ready(on, POLLIN))
            return false;
        ssize_t got = recv(on->fd, at, size, MSG_DONTWAIT);
        if (got == 0 || (got < 0 && errno != EINTR && errno != EAGAIN)) {
            set_problem("the agent closed the connection without an answer%s%s", got ? ": " : "",
                        got ? strerror(errno) : "");
            return false;
        }
        if (got > 0) {
            at += got;
            size -= (size_t)got;
        }
    }
    return true;
}

static size_t put_head(uint8_t *to, size_t size, enum frame kind, uint8_t flags, uint32_t stream)
{
    const uint8_t head[FRAME_HEAD] = {
        (uint8_t)(size >> 16), (uint8_t)(size >> 8), (uint8_t)size, (uint8_t)kind, flags,
        (uint8_t)(stream >> 24), (uint8_t)(stream >> 16), (uint8_t)(stream >> 8), (uint8_t)stream
    };
    memcpy(to, head, sizeof head);
    return sizeof head;
}

/* Adds the field `number` of the message, a text of less than 16 KiB; none where it is empty. */
static size_t put_protobuf(uint8_t *to, int number, const char *text)
{
    size_t length = strlen(text), at = 0;
    if (!length)
        return 0;
    to[at++] = (uint8_t)(number << 3 | 2);
    if (length > 127)
        to[at++] = (uint8_t)(length & 127) | 128;
    to[at++] = (uint8_t)(length > 127 ? length >> 7 : length);
    memcpy(to + at, text, length);
    return at + length;
}

static bool send_request(const struct connection *on, const struct vdevice_names *with)
{
    static const char PREFACE[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    static const uint8_t OWN_SETTINGS[] = {0, 1, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0}; /* header table 0, no pushes */
    uint8_t out[2048], fields[256], message[1024];
    size_t size = sizeof PREFACE - 1, length = 0, request = 5;

    memcpy(out, PREFACE, size);
    size += put_head(out + size, sizeof OWN_SETTINGS, SETTINGS, 0, 0);
    memcpy(out + size, OWN_SETTINGS, sizeof OWN_SETTINGS);
    size += sizeof OWN_SETTINGS;

    fields[length++] = 0x80 | 3; /* :method POST */
    fields[length++] = 0x80 | 6; /* :scheme http */
    fields[length++] = 4; /* :path, 1 :authority, 31 content-type: names of the static table, with values of ours */
    length += put_text(fields + length, "/vcuda.VCUDAService/RegisterVDevice");
    fields[length++] = 1;
    length += put_text(fields + length, "localhost");
    fields[length++] = 15; /* 31 does not fit four bits: 15 and 16 */
    fields[length++] = 16;
    length += put_text(fields + length, "application/grpc");
    fields[length++] = 0;
    length += put_text(fields + length, "te");
    length += put_text(fields + length, "trailers");
    size += put_head(out + size, length, HEADERS, END_HEADERS, STREAM);
    memcpy(out + size, fields, length);
    size += length;

    request += put_protobuf(message + request, 2, with->pod_uid);
    request += put_protobuf(message + request, 3, with->name);
    request += put_protobuf(message + request, 4, with->id);
    const uint8_t prefix[5] = {0, 0, 0, (uint8_t)((request - 5) >> 8), (uint8_t)(request - 5)}; /* not compressed, size */
    memcpy(message, prefix, sizeof prefix);
    size += put_head(out + size, request, DATA, END_STREAM, STREAM);
    memcpy(out + size, message, request);
    return send_all(on, out, size + request);
}

static bool acknowledge(const struct connection *on, enum frame kind, size_t size)
{
    uint8_t out[FRAME_HEAD + 8];
    put_head(out, size, kind, ACK, 0);
    memcpy(out + FRAME_HEAD, on->frame, size);
    return send_all(on, out, FRAME_HEAD + size);
}

static bool not_understood(const char *what)
{
    set_problem("the answer cannot be read: %s", what);
    return false;
}

struct head { size_t size; uint32_t stream; uint8_t kind, flags; };

/* Reads the next frame, its content into `on->frame`. */
static bool receive_frame(struct connection *on, struct head *head)
{
    uint8_t in[FRAME_HEAD];
    if (!receive_all(on, in, sizeof in))
        return false;
    head->size = (size_t)in[0] << 16 | (size_t)in[1] << 8 | in[2];
    head->kind = in[3];
    head->flags = in[4];
    head->stream = (in[5] & 0x7fu) << 24 | (uint32_t)in[6] << 16 | (uint32_t)in[7] << 8 | in[8];
    if (head->size > sizeof on->frame)
        return not_understood("a frame of more than 16 KiB");
    return receive_all(on, on->frame, head->size);
}

/* Answers what must be answered; false where the call cannot end on this connection. */
static bool handle_connection_frame(const struct connection *on, const struct head *head)
{
    static const uint8_t NO_STREAM[4] = {0};
    switch (head->kind) {
    case SETTINGS:
        return head->flags & ACK || acknowledge(on, SETTINGS, 0);
    case PING:
        if (head->size != 8)
            return not_understood("a ping of another size than 8");
        return head->flags & ACK || acknowledge(on, PING, head->size);
    case GOAWAY: /* it names the last stream that will be served: ours is the only one */
        if (head->size >= 8 && memcmp(on->frame, NO_STREAM, sizeof NO_STREAM))
            return true;
        set_problem("the agent is shutting down");
        return false;
    case PUSH_PROMISE:
        return not_understood("a promised push");
    default:
        return true;
    }
}

/* Takes the frame's part of a header block: HEADERS may be padded and may name a priority. */
static bool add_to_block(struct connection *to, const struct head *head)
{
    size_t first = 0, padding = 0, size = head->size;
    if (head->kind == HEADERS && head->flags & PADDED) {
        if (!size)
            return false;
        padding = to->frame[first++];
    }
    if (head->kind == HEADERS && head->flags & HAS_PRIORITY)
        first += 5;
    if (first + padding > size || to->block_size + size - first - padding > sizeof to->block)
        return false;
    size -= first + padding;
    memcpy(to->block + to->block_size, to->frame + first, size);
    to->block_size += size;
    return true;
}

/* Reads frames until the call has its status; false where it will not get one on this connection. */
static bool receive_status(struct connection *on)
{
    bool is_in_block = false, ends = false;
    struct head head;
    while (on->status < 0) {
        if (ends && !is_in_block)
            return not_understood("it ended without a status");
        if (!receive_frame(on, &head))
            return false;
        if (is_in_block != (head.kind == CONTINUATION) || (is_in_block && head.stream != STREAM))
            return not_understood("a header block is interrupted");
        if (!handle_connection_frame(on, &head))
            return false;
        if (head.stream != STREAM)
            continue;
        if (head.kind == RST_STREAM) {
            set_problem("the agent ended the call");
            return false;
        }
        if (head.kind == DATA || head.kind == HEADERS)
            ends = head.flags & END_STREAM;
        if (head.kind != HEADERS && head.kind != CONTINUATION)
            continue;
        if (head.kind == HEADERS)
            on->block_size = 0;
        if (!add_to_block(on, &head))
            return not_understood("a header block that is malformed or over 16 KiB");
        is_in_block = !(head.flags & END_HEADERS);
        if (!is_in_block && !read_block(on))
            return not_understood("a malformed header block");
    }
    return true;
}

/* ---- Registering ---- */

static bool open_connection(struct connection *on, const char *path, int longest_ms)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    const struct timeval longest = {longest_ms / 1000, longest_ms % 1000 * 1000};
    memcpy(address.sun_path, path, strlen(path));
    on->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (on->fd < 0) {
        set_problem("socket: %s", strerror(errno));
        return false;
    }
    setsockopt(on->fd, SOL_SOCKET, SO_SNDTIMEO, &longest, sizeof longest); /* connect waits while the queue is full */
    if (connect(on->fd, (const struct sockaddr *)&address, sizeof address)) {
        set_problem("%s", errno == EAGAIN ? "the agent accepts no connection" : strerror(errno));
        return false;
    }
    return true;
}

static const char *name_of(int status)
{
    static const char *const NAMES[] = {
        "OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS",
        "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED",
        "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED"
    };
    return status < (int)(sizeof NAMES / sizeof *NAMES) ? NAMES[status] : "an unknown status";
}

/* Undoes grpc-message's percent encoding in place, and leaves out control characters: it goes to a terminal. */
static void make_printable(char *text)
{
    char *to = text;
    for (const char *at = text; *at; at++) {
        char byte = *at, digits[3] = {0};
        if (byte == '%' && at[1] && at[2]) {
            char *end;
            memcpy(digits, at + 1, 2);
            long value = strtol(digits, &end, 16);
            if (end == digits + 2) {
                byte = (char)value;
                at += 2;
            }
        }
        if ((uint8_t)byte >= ' ' && byte != 127)
            *to++ = byte;
    }
    *to = 0;
}

enum vdevice_outcome register_vdevice(const struct vdevice_names *with, int longest_ms)
{
    static struct connection on; /* too large for a stack that the caller's limits may keep small */
    memset(&on, 0, sizeof on);
    on.fd = on.status = -1;
    on.deadline_ms = now_ms() + longest_ms;
    bool is_answered = open_connection(&on, with->addr, longest_ms) && send_request(&on, with) && receive_status(&on);
    if (on.fd >= 0)
        close(on.fd);
    if (!is_answered)
        return NO_ANSWER;
    make_printable(on.text);
    set_problem("%s: %s", name_of(on.status), on.text);
    switch (on.status) {
    case 0:
        return REGISTERED;
    case 3: case 7: case 12: case 16: /* INVALID_ARGUMENT, PERMISSION_DENIED, UNIMPLEMENTED, UNAUTHENTICATED */
        return REFUSED;
    default:
        return NO_ANSWER;
    }
}
