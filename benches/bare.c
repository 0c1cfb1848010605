/* The limit that `cargo bench --bench peer` compares with: one client, a blocking receive, all requests of it, and
 * one vectored send of all replies, straight from memory. It checks nothing and trusts its client.
 *
 *   bare SOCKET BYTES
 */
#define _GNU_SOURCE
#include <endian.h>
#include <err.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>

enum { INPUT = 128 << 10, REPLIES = 512, SEND_BUFFER = 1 << 20 };

struct request {
    uint32_t magic;
    uint16_t flags, command;
    uint64_t cookie, offset;
    uint32_t length;
} __attribute__((packed));

struct reply {
    uint32_t magic, error;
    uint64_t cookie;
} __attribute__((packed));

static int client;
static char *memory, input[INPUT];
static struct reply replies[REPLIES];
static struct iovec pieces[2 * REPLIES];
static int reply_count, piece_count;

static void put(const void *bytes, size_t length) {
    if (send(client, bytes, length, MSG_NOSIGNAL) != (ssize_t)length) exit(0);
}

static void take(void *bytes, size_t length) {
    if (length > 0 && recv(client, bytes, length, MSG_WAITALL) != (ssize_t)length) exit(0);
}

static void send_replies(void) {
    struct msghdr message = {.msg_iov = pieces, .msg_iovlen = piece_count};
    while (message.msg_iovlen > 0) {
        ssize_t sent = sendmsg(client, &message, MSG_NOSIGNAL);
        if (sent < 0) exit(0);
        for (; message.msg_iovlen > 0 && (size_t)sent >= message.msg_iov->iov_len; message.msg_iovlen--)
            sent -= message.msg_iov++->iov_len;
        if (message.msg_iovlen > 0) {
            message.msg_iov->iov_base = (char *)message.msg_iov->iov_base + sent;
            message.msg_iov->iov_len -= sent;
        }
    }
    reply_count = piece_count = 0;
}

/* Executes the request. `arrived` bytes after it have been received. Returns how many of them are its payload. */
static size_t execute(const struct request *request, const char *payload, size_t arrived) {
    char *data = memory + be64toh(request->offset);
    size_t length = be32toh(request->length);
    struct reply *reply = &replies[reply_count++];
    *reply = (struct reply){htobe32(0x67446698), 0, request->cookie};
    pieces[piece_count++] = (struct iovec){reply, sizeof *reply};
    if (request->command == htobe16(0)) {
        pieces[piece_count++] = (struct iovec){data, length};
        return 0;
    }
    size_t taken = arrived < length ? arrived : length;
    memcpy(data, payload, taken);
    take(data + taken, length - taken);
    return taken;
}

static void serve(void) {
    size_t end = 0;
    for (;;) {
        ssize_t received = recv(client, input + end, INPUT - end, 0);
        if (received <= 0) exit(0);
        end += received;
        size_t at = 0;
        while (end - at >= sizeof(struct request)) {
            const struct request *request = (struct request *)(input + at);
            at += sizeof *request;
            at += execute(request, input + at, end - at);
            if (reply_count == REPLIES) send_replies();
        }
        send_replies();
        memmove(input, input + at, end -= at);
    }
}

int main(int argc, char **argv) {
    if (argc != 3) errx(2, "usage: bare SOCKET BYTES");
    uint64_t size = strtoull(argv[2], NULL, 10), size_be = htobe64(size);
    memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) err(1, "mmap");
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    strncpy(address.sun_path, argv[1], sizeof address.sun_path - 1);
    int listener = socket(AF_UNIX, SOCK_STREAM, 0), buffer = SEND_BUFFER;
    if (bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, 1)) err(1, "%s", argv[1]);
    client = accept(listener, NULL, NULL);
    if (setsockopt(client, SOL_SOCKET, SO_SNDBUFFORCE, &buffer, sizeof buffer))
        setsockopt(client, SOL_SOCKET, SO_SNDBUF, &buffer, sizeof buffer);
    put("NBDMAGICIHAVEOPT\0\3", 18);
    take(input, 20);
    put(&size_be, 8);
    put("\0\1", 2);
    serve();
}
