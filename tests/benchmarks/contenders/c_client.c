/* The C client, librabbitmq: what this machine and broker can do without an interpreter.
 * c_client consume|publish HOST PORT USER PASSWORD VHOST QUEUE MESSAGES PREFETCH BROKER-PID; prints the contenders' line of JSON.
 * It acknowledges each message, as the others do, but decodes no JSON. */
#include <amqp.h>
#include <amqp_framing.h>
#include <amqp_tcp_socket.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#define WINDOW 500
static double began, ended, cpu, broker_cpu;
static int broker;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

static double cpu_seconds(void) {
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return u.ru_utime.tv_sec + u.ru_stime.tv_sec + (u.ru_utime.tv_usec + u.ru_stime.tv_usec) / 1e6;
}

/* of the broker's process; 0 where it cannot be seen */
static double broker_seconds(void) {
    char path[64], line[1024] = "";
    unsigned long user = 0, system = 0;
    snprintf(path, sizeof path, "/proc/%d/stat", broker);
    FILE *file = broker ? fopen(path, "r") : NULL;
    if (!file) return 0;
    if (!fgets(line, sizeof line, file)) line[0] = 0;
    fclose(file);
    char *rest = strrchr(line, ')');
    if (rest) sscanf(rest + 1, " %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %lu %lu", &user, &system);
    return (user + system) / (double)sysconf(_SC_CLK_TCK);
}

static double most_rss_mb(void) {
    char line[256];
    double kilobytes = 0;
    FILE *file = fopen("/proc/self/status", "r");
    while (file && fgets(line, sizeof line, file)) sscanf(line, "VmHWM: %lf", &kilobytes);
    if (file) fclose(file);
    return kilobytes * 1024 / 1e6;
}

static void begin(void) { cpu = -cpu_seconds(); broker_cpu = -broker_seconds(); began = now(); }
static void end(void) { ended = now(); cpu += cpu_seconds(); broker_cpu += broker_seconds(); }

static void need(int good, const char *what) {
    if (!good) { fprintf(stderr, "failed: %s\n", what); exit(1); }
}

static void consume(amqp_connection_state_t c, amqp_bytes_t queue, long messages, int prefetch) {
    need(amqp_basic_qos(c, 1, 0, prefetch, 0) != NULL, "qos");
    need(amqp_basic_consume(c, 1, queue, amqp_empty_bytes, 0, 0, 0, amqp_empty_table) != NULL, "consume");
    for (long count = 1; count <= messages; count++) {
        amqp_envelope_t envelope;
        amqp_maybe_release_buffers(c);
        need(amqp_consume_message(c, &envelope, NULL, 0).reply_type == AMQP_RESPONSE_NORMAL, "delivery");
        if (count == 1) begin();
        need(envelope.message.body.len > 0, "body");
        if (count == messages) end();
        need(amqp_basic_ack(c, 1, envelope.delivery_tag, 0) == 0, "ack");
        amqp_destroy_envelope(&envelope);
    }
}

static void publish(amqp_connection_state_t c, amqp_bytes_t queue, long messages) {
    amqp_basic_properties_t properties;
    memset(&properties, 0, sizeof properties);
    properties._flags = AMQP_BASIC_CONTENT_TYPE_FLAG | AMQP_BASIC_DELIVERY_MODE_FLAG;
    properties.content_type = amqp_cstring_bytes("application/json");
    properties.delivery_mode = 2;
    need(amqp_confirm_select(c, 1) != NULL, "confirm");
    begin();
    for (long sent = 0, confirmed = 0; confirmed < messages;) {
        while (sent < messages && sent - confirmed < WINDOW) {
            char body[512];
            snprintf(body, sizeof body,
                     "{\"place\": %ld, \"customer\": \"Ada Lovelace\", \"address\": \"12 St James's Square, London SW1Y 4JH\", "
                     "\"total\": 31.5, \"items\": [{\"sku\": \"A-1843\", \"count\": 2}, {\"sku\": \"B-1815\", \"count\": 1}], "
                     "\"note\": \"leave it at the door, please\"}", sent);
            need(amqp_basic_publish(c, 1, amqp_empty_bytes, queue, 1, 0, &properties, amqp_cstring_bytes(body)) == 0, "publish");
            sent++;
        }
        amqp_frame_t frame;
        amqp_maybe_release_buffers(c);
        need(amqp_simple_wait_frame(c, &frame) == AMQP_STATUS_OK, "frame");
        need(frame.frame_type == AMQP_FRAME_METHOD && frame.payload.method.id == AMQP_BASIC_ACK_METHOD, "confirm of a message");
        amqp_basic_ack_t *ack = frame.payload.method.decoded;
        confirmed = ack->multiple ? (long)ack->delivery_tag : confirmed + 1;
    }
    end();
}

int main(int argc, char **argv) {
    need(argc == 11, "ten arguments");
    broker = atoi(argv[10]);
    long messages = atol(argv[8]);
    amqp_bytes_t queue = amqp_cstring_bytes(argv[7]);
    amqp_connection_state_t c = amqp_new_connection();
    need(amqp_socket_open(amqp_tcp_socket_new(c), argv[2], atoi(argv[3])) == AMQP_STATUS_OK, "connect");
    need(amqp_login(c, argv[6], 0, 131072, 0, AMQP_SASL_METHOD_PLAIN, argv[4], argv[5]).reply_type == AMQP_RESPONSE_NORMAL, "login");
    amqp_channel_open(c, 1);
    need(amqp_get_rpc_reply(c).reply_type == AMQP_RESPONSE_NORMAL, "channel");
    if (strcmp(argv[1], "consume") == 0) consume(c, queue, messages, atoi(argv[9]));
    else publish(c, queue, messages);
    usleep(300000); /* a broker that sees the channel close may not have the last acks applied */
    amqp_channel_close(c, 1, AMQP_REPLY_SUCCESS);
    amqp_connection_close(c, AMQP_REPLY_SUCCESS);
    char broker_text[32] = "null";
    if (broker) snprintf(broker_text, sizeof broker_text, "%f", broker_cpu);
    printf("{\"seconds\": %f, \"began\": %f, \"messages\": %ld, \"cpu\": %f, \"broker_cpu\": %s, \"rss_mb\": %f}\n",
           ended - began, began, messages, cpu, broker_text, most_rss_mb());
    return 0;
}
