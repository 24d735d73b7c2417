/* Test of the C interface. Prints the failed check and ends with 1 on the first failure. */

#define _POSIX_C_SOURCE 200809L

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <tarnsoft.h>

#define CHECK(condition)                                                                                      \
    do {                                                                                                       \
        if (!(condition)) {                                                                                    \
            fprintf(stderr, "%s:%d: %s is false; last error: %s\n", __func__, __LINE__, #condition,            \
                    soft_error_string(soft_last_error()));                                                     \
            exit(1);                                                                                           \
        }                                                                                                      \
    } while (0)
#define CHECK_LAST(error) CHECK(soft_last_error() == (error))

enum { THREADS = 8, THREAD_OPERATIONS = 2000, FORKS = 10 };

static soft_pool_t *new_pool(size_t pages)
{
    soft_pool_t *pool = soft_pool_create(pages);
    CHECK(pool != NULL);
    return pool;
}

static soft_context_t *new_context(soft_pool_t *pool, uint8_t priority)
{
    soft_context_t *context = soft_context_create(pool, priority, NULL, NULL);
    CHECK(context != NULL);
    return context;
}

static void destroy(soft_context_t *context, soft_pool_t *pool)
{
    CHECK(soft_context_destroy(context) == SOFT_OK);
    CHECK(soft_pool_destroy(pool) == SOFT_OK);
}

/* Allocates a block, and sets all its bytes. */
static soft_handle_t new_block(soft_context_t *context, size_t size, int byte)
{
    soft_handle_t handle = soft_malloc(context, size);
    void *block = soft_pin(context, handle);
    CHECK(handle != 0 && block != NULL);
    memset(block, byte, size);
    CHECK(soft_unpin(context, handle) == SOFT_OK);
    return handle;
}

static int has_bytes(const void *block, size_t size, int byte)
{
    const unsigned char *bytes = block;
    for (size_t n = 0; n < size; n++) {
        if (bytes[n] != byte) {
            return 0;
        }
    }
    return 1;
}

static struct soft_pool_stats pool_stats(soft_pool_t *pool)
{
    struct soft_pool_stats stats;
    CHECK(soft_pool_get_stats(pool, &stats) == SOFT_OK);
    return stats;
}

static struct soft_context_stats context_stats(soft_context_t *context)
{
    struct soft_context_stats stats;
    CHECK(soft_context_get_stats(context, &stats) == SOFT_OK);
    return stats;
}

static const char *connect_message;

/* The message is valid until the main thread has ended. */
static void check_message_at_exit(void)
{
    if (strstr(connect_message, "/nonexistent/soft.sock") == NULL) {
        abort();
    }
}

static void test_invalid_arguments(void)
{
    soft_pool_t *pool = new_pool(4);
    soft_context_t *context = new_context(pool, 0);
    struct soft_context_stats stats;
    CHECK(soft_malloc(NULL, 1) == 0);
    CHECK_LAST(SOFT_ERROR_INVALID_ARGUMENT);
    CHECK(soft_context_create(NULL, 0, NULL, NULL) == NULL);
    CHECK(soft_pool_destroy(NULL) == SOFT_ERROR_INVALID_ARGUMENT);
    CHECK(soft_pool_get_stats(pool, NULL) == SOFT_ERROR_INVALID_ARGUMENT);
    CHECK(soft_context_get_stats(context, NULL) == SOFT_ERROR_INVALID_ARGUMENT);
    CHECK(soft_context_get_stats(NULL, &stats) == SOFT_ERROR_INVALID_ARGUMENT);
    CHECK(soft_free(context, 0) == SOFT_ERROR_INVALID_ARGUMENT);
    CHECK(soft_pin(context, 0) == NULL);
    CHECK(soft_unpin(context, 0) == SOFT_ERROR_INVALID_ARGUMENT);
    CHECK(soft_free(context, 12345) == SOFT_ERROR_STALE_HANDLE);
    CHECK(soft_size(context, 12345) == SOFT_SIZE_ERROR);
    CHECK(soft_reclaim(NULL, 1) == SOFT_SIZE_ERROR && soft_revoke(NULL, 1) == SOFT_SIZE_ERROR);
    /* Identifiers of the other type, and addresses. */
    CHECK(soft_malloc((soft_context_t *)pool, 1) == 0);
    CHECK_LAST(SOFT_ERROR_INVALID_CONTEXT);
    CHECK(soft_pool_destroy((soft_pool_t *)context) == SOFT_ERROR_INVALID_POOL);
    CHECK(soft_malloc((soft_context_t *)&stats, 1) == 0);
    CHECK(soft_pool_connect(NULL, 1) == NULL);
    CHECK_LAST(SOFT_ERROR_INVALID_ARGUMENT);
    CHECK(soft_pool_connect("/nonexistent/soft.sock", 1) == NULL);
    CHECK_LAST(SOFT_ERROR_DAEMON);
    connect_message = soft_last_error_message();
    CHECK(strstr(connect_message, "/nonexistent/soft.sock: No such file or directory") != NULL);
    CHECK(atexit(check_message_at_exit) == 0);
    CHECK(soft_pool_create(SIZE_MAX) == NULL);
    CHECK_LAST(SOFT_ERROR_TOO_LARGE);
    CHECK(strcmp(soft_last_error_message(), "the size exceeds the maximum") == 0);
    CHECK(strcmp(soft_error_string(SOFT_OK), "no error") == 0);
    CHECK(strcmp(soft_error_string(SOFT_ERROR_PINNED), "a block is pinned") == 0);
    CHECK(strcmp(soft_error_string(-7), "unknown error") == 0);
    CHECK(strcmp(soft_version(), "0.1.0") == 0);
    destroy(context, pool);
}

static void test_allocation(void)
{
    soft_pool_t *pool = new_pool(64);
    soft_context_t *context = new_context(pool, 0);
    const size_t sizes[] = {0, 1, 15, 16, 17, 4096, 32768, 32769, 100000};
    for (size_t n = 0; n < sizeof sizes / sizeof *sizes; n++) {
        soft_handle_t handle = soft_malloc(context, sizes[n]);
        char *block = soft_pin(context, handle);
        CHECK(block != NULL && (uintptr_t)block % 16 == 0 && soft_size(context, handle) == sizes[n]);
        CHECK(has_bytes(block, sizes[n], 0));
        memset(block, 0xa5, sizes[n]);
        CHECK(soft_unpin(context, handle) == SOFT_OK && soft_free(context, handle) == SOFT_OK);
    }
    soft_handle_t handle = soft_calloc(context, 10, 10);
    CHECK(soft_size(context, handle) == 100 && has_bytes(soft_pin(context, handle), 100, 0));
    CHECK(soft_unpin(context, handle) == SOFT_OK);
    CHECK(soft_calloc(context, 0, SIZE_MAX) != 0);
    CHECK(context_stats(context).blocks == 2);
    destroy(context, pool);
}

static void test_overflow(void)
{
    soft_pool_t *pool = new_pool(4);
    soft_context_t *context = new_context(pool, 0);
    CHECK(soft_calloc(context, SIZE_MAX, 2) == 0);
    CHECK_LAST(SOFT_ERROR_TOO_LARGE);
    CHECK(soft_calloc(context, (size_t)1 << 32, (size_t)1 << 32) == 0);
    CHECK_LAST(SOFT_ERROR_TOO_LARGE);
    CHECK(soft_malloc(context, SIZE_MAX) == 0);
    CHECK_LAST(SOFT_ERROR_TOO_LARGE);
    CHECK(soft_malloc(context, (size_t)UINT32_MAX + 1) == 0);
    CHECK_LAST(SOFT_ERROR_TOO_LARGE);
    CHECK(soft_malloc(context, UINT32_MAX) == 0);
    CHECK_LAST(SOFT_ERROR_OUT_OF_BUDGET);
    CHECK(context_stats(context).blocks == 0 && pool_stats(pool).held_pages == 0);
    destroy(context, pool);
}

static void test_stale_handles(void)
{
    soft_pool_t *pool = new_pool(4);
    soft_context_t *context = new_context(pool, 0);
    soft_handle_t freed = new_block(context, 100, 1);
    CHECK(soft_free(context, freed) == SOFT_OK);
    CHECK(soft_free(context, freed) == SOFT_ERROR_STALE_HANDLE);
    soft_handle_t other = new_block(context, 100, 2);
    CHECK(other != freed);
    CHECK(soft_free(context, freed) == SOFT_ERROR_STALE_HANDLE);
    CHECK(soft_pin(context, freed) == NULL);
    CHECK_LAST(SOFT_ERROR_STALE_HANDLE);
    CHECK(soft_unpin(context, freed) == SOFT_ERROR_STALE_HANDLE);
    CHECK(soft_size(context, freed) == SOFT_SIZE_ERROR);
    CHECK(has_bytes(soft_pin(context, other), 100, 2));
    CHECK(soft_unpin(context, other) == SOFT_OK && soft_free(context, other) == SOFT_OK);
    destroy(context, pool);
}

static void test_exhaustion(void)
{
    soft_pool_t *pool = new_pool(4);
    soft_context_t *context = new_context(pool, 0);
    soft_handle_t first = new_block(context, 1024, 1);
    size_t blocks = 1;
    while (soft_malloc(context, 1024) != 0) {
        blocks++;
    }
    CHECK_LAST(SOFT_ERROR_OUT_OF_BUDGET);
    CHECK(blocks == 16 && pool_stats(pool).held_pages == 4);
    CHECK(soft_reclaim(context, 1) == 1 && context_stats(context).revoked_blocks == 4);
    CHECK(soft_pin(context, first) == NULL);
    CHECK(soft_malloc(context, 1024) != 0);
    CHECK(soft_revoke(pool, 3) == 3 && soft_grant(pool, 7) == SOFT_OK);
    CHECK(pool_stats(pool).budget_pages == 8 && pool_stats(pool).held_pages == 1);
    CHECK(soft_grant(pool, SIZE_MAX) == SOFT_ERROR_TOO_LARGE && soft_grant(pool, (1 << 24) - 7) == SOFT_ERROR_TOO_LARGE);
    CHECK(pool_stats(pool).budget_pages == 8);
    destroy(context, pool);
}

static void test_pins(void)
{
    soft_pool_t *pool = new_pool(8);
    soft_context_t *context = new_context(pool, 0);
    soft_handle_t blocks[16];
    for (int n = 0; n < 16; n++) {
        blocks[n] = new_block(context, 2048, n);
    }
    CHECK(soft_unpin(context, blocks[3]) == SOFT_ERROR_NOT_PINNED);
    const char *block = soft_pin(context, blocks[3]);
    CHECK(soft_pin(context, blocks[3]) == block);
    CHECK(soft_free(context, blocks[3]) == SOFT_ERROR_PINNED);
    CHECK(soft_context_destroy(context) == SOFT_ERROR_PINNED);
    CHECK(soft_revoke(pool, 8) == 7);
    CHECK(has_bytes(block, 2048, 3) && context_stats(context).blocks == 1);
    CHECK(soft_unpin(context, blocks[3]) == SOFT_OK);
    CHECK(soft_revoke(pool, 8) == 0 && soft_free(context, blocks[3]) == SOFT_ERROR_PINNED);
    CHECK(soft_unpin(context, blocks[3]) == SOFT_OK);
    CHECK(soft_unpin(context, blocks[3]) == SOFT_ERROR_NOT_PINNED);
    CHECK(soft_revoke(pool, 8) == 1 && soft_pin(context, blocks[3]) == NULL);
    CHECK_LAST(SOFT_ERROR_STALE_HANDLE);
    destroy(context, pool);
}

static void test_order(void)
{
    soft_pool_t *pool = new_pool(8);
    soft_context_t *high = new_context(pool, 255), *low = new_context(pool, 1);
    soft_handle_t kept = new_block(high, 16, 1), blocks[4];
    for (int n = 0; n < 4; n++) {
        blocks[n] = new_block(low, 4096, n);
    }
    CHECK(soft_pin(low, blocks[0]) != NULL && soft_unpin(low, blocks[0]) == SOFT_OK);
    CHECK(soft_revoke(pool, 3) == 3 && context_stats(low).revoked_blocks == 0);
    CHECK(soft_revoke(pool, 2) == 2);
    CHECK(soft_size(low, blocks[0]) == 4096 && soft_size(low, blocks[3]) == 4096);
    CHECK(soft_size(low, blocks[1]) == SOFT_SIZE_ERROR && soft_size(low, blocks[2]) == SOFT_SIZE_ERROR);
    CHECK(soft_size(high, kept) == 16);
    CHECK(soft_revoke(pool, SIZE_MAX) == 3 && soft_size(high, kept) == SOFT_SIZE_ERROR);
    CHECK(soft_context_destroy(low) == SOFT_OK);
    destroy(high, pool);
}

static void test_priority_change(void)
{
    soft_pool_t *pool = new_pool(4);
    soft_context_t *first = new_context(pool, 0), *second = new_context(pool, 1);
    for (int n = 0; n < 2; n++) {
        new_block(first, 4096, n);
        new_block(second, 4096, n);
    }
    CHECK(soft_context_set_priority(first, 255) == SOFT_OK);
    CHECK(soft_revoke(pool, 1) == 1);
    CHECK(context_stats(first).blocks == 2 && context_stats(second).blocks == 1);
    /* At equal priority, the oldest context is first. */
    CHECK(soft_context_set_priority(second, 255) == SOFT_OK);
    CHECK(soft_revoke(pool, 1) == 1);
    CHECK(context_stats(first).blocks == 1 && context_stats(second).blocks == 1);
    CHECK(soft_context_set_priority(NULL, 0) == SOFT_ERROR_INVALID_ARGUMENT);
    CHECK(soft_context_set_priority((soft_context_t *)pool, 0) == SOFT_ERROR_INVALID_CONTEXT);
    CHECK(soft_context_destroy(first) == SOFT_OK);
    CHECK(soft_context_set_priority(first, 0) == SOFT_ERROR_INVALID_CONTEXT);
    destroy(second, pool);
}

struct log {
    soft_pool_t *pool;
    soft_context_t *context;
    soft_handle_t handles[4];
    size_t sizes[4];
    int bytes[4];
    int calls;
};

static void log_block(soft_handle_t handle, const void *data, size_t size, void *user_data)
{
    struct log *log = user_data;
    const unsigned char *bytes = data;
    CHECK(log->calls < 4 && (uintptr_t)data % 16 == 0);
    log->handles[log->calls] = handle;
    log->sizes[log->calls] = size;
    log->bytes[log->calls] = size > 0 ? bytes[0] : 0;
    CHECK(has_bytes(data, size, log->bytes[log->calls]));
    log->calls++;
    CHECK(soft_free(log->context, handle) == SOFT_ERROR_STALE_HANDLE);
}

static void test_callback(void)
{
    soft_pool_t *pool = new_pool(64);
    struct log log = {0};
    log.context = soft_context_create(pool, 0, log_block, &log);
    soft_handle_t empty = soft_malloc(log.context, 0);
    soft_handle_t small = new_block(log.context, 100, 7), large = new_block(log.context, 100000, 8);
    CHECK(soft_free(log.context, new_block(log.context, 100, 9)) == SOFT_OK);
    CHECK(soft_revoke(pool, 64) == 64 && log.calls == 3);
    CHECK(log.handles[0] == empty && log.sizes[0] == 0);
    CHECK(log.handles[1] == small && log.sizes[1] == 100 && log.bytes[1] == 7);
    CHECK(log.handles[2] == large && log.sizes[2] == 100000 && log.bytes[2] == 8);
    CHECK(soft_grant(pool, 64) == SOFT_OK);
    new_block(log.context, 100, 1);
    destroy(log.context, pool);
    CHECK(log.calls == 3);
}

/* Uses the library, and destroys the context of the callback. */
static void destroy_in_callback(soft_handle_t handle, const void *data, size_t size, void *user_data)
{
    struct log *log = user_data;
    log->calls++;
    soft_handle_t copy = soft_malloc(log->context, size);
    void *block = soft_pin(log->context, copy);
    CHECK(block != NULL && copy != handle);
    memcpy(block, data, size);
    CHECK(has_bytes(block, size, 5));
    CHECK(soft_unpin(log->context, copy) == SOFT_OK);
    CHECK(soft_revoke(log->pool, 0) == 0);
    CHECK(soft_context_destroy(log->context) == SOFT_OK);
}

static void test_callback_uses_library(void)
{
    struct log log = {0};
    log.pool = new_pool(64);
    log.context = soft_context_create(log.pool, 0, destroy_in_callback, &log);
    for (int n = 0; n < 10; n++) {
        new_block(log.context, 4096, 5);
    }
    soft_context_t *destroyed = log.context;
    CHECK(soft_reclaim(destroyed, 10) > 0 && log.calls == 1);
    CHECK(soft_malloc(destroyed, 1) == 0);
    CHECK_LAST(SOFT_ERROR_INVALID_CONTEXT);
    CHECK(pool_stats(log.pool).held_pages == 0);
    CHECK(soft_pool_destroy(log.pool) == SOFT_OK);
}

struct waiting {
    soft_pool_t *pool;
    soft_context_t *context;
    atomic_int has_started, has_finished;
};

/* Runs until another thread destroys the context. */
static void wait_for_destruction(soft_handle_t handle, const void *data, size_t size, void *user_data)
{
    struct waiting *waiting = user_data;
    struct soft_context_stats stats;
    (void)handle, (void)data, (void)size;
    waiting->has_started = 1;
    while (soft_context_get_stats(waiting->context, &stats) == SOFT_OK) {
    }
    waiting->has_finished = 1;
}

static void *revoke_all(void *argument)
{
    struct waiting *waiting = argument;
    soft_revoke(waiting->pool, SIZE_MAX);
    return NULL;
}

static void test_destruction_waits_for_callback(void)
{
    struct waiting waiting = {.pool = new_pool(8)};
    pthread_t thread;
    waiting.context = soft_context_create(waiting.pool, 0, wait_for_destruction, &waiting);
    new_block(waiting.context, 10, 1);
    CHECK(pthread_create(&thread, NULL, revoke_all, &waiting) == 0);
    while (!waiting.has_started) {
    }
    CHECK(soft_context_destroy(waiting.context) == SOFT_OK && waiting.has_finished);
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK(soft_pool_destroy(waiting.pool) == SOFT_OK);
}

static void test_destroyed_objects(void)
{
    soft_pool_t *pool = new_pool(8);
    soft_context_t *context = new_context(pool, 0);
    soft_handle_t handle = new_block(context, 10, 1);
    CHECK(soft_pool_destroy(pool) == SOFT_OK);
    CHECK(soft_pool_destroy(pool) == SOFT_ERROR_INVALID_POOL);
    CHECK(soft_revoke(pool, 1) == SOFT_SIZE_ERROR && soft_context_create(pool, 0, NULL, NULL) == NULL);
    CHECK_LAST(SOFT_ERROR_INVALID_POOL);
    /* The context keeps the memory of the pool. */
    CHECK(has_bytes(soft_pin(context, handle), 10, 1) && soft_unpin(context, handle) == SOFT_OK);
    CHECK(soft_context_destroy(context) == SOFT_OK);
    CHECK(soft_context_destroy(context) == SOFT_ERROR_INVALID_CONTEXT);
    CHECK(soft_pin(context, handle) == NULL);
    CHECK_LAST(SOFT_ERROR_INVALID_CONTEXT);
    soft_pool_t *other_pool = new_pool(8);
    soft_context_t *other = new_context(other_pool, 0);
    CHECK(other_pool != pool && other != context);
    destroy(other, other_pool);
}

/* The last error belongs to a thread. */
static void *check_no_error(void *argument)
{
    (void)argument;
    CHECK_LAST(SOFT_OK);
    return NULL;
}

static void test_error_of_thread(void)
{
    pthread_t thread;
    CHECK(soft_malloc(NULL, 1) == 0);
    CHECK(pthread_create(&thread, NULL, check_no_error, NULL) == 0 && pthread_join(thread, NULL) == 0);
    CHECK_LAST(SOFT_ERROR_INVALID_ARGUMENT);
}

struct shared {
    soft_pool_t *pool;
    soft_context_t *context;
    atomic_int running, stop;
};

struct user {
    struct shared *shared;
    int byte;
};

static void check_revoked(soft_handle_t handle, const void *data, size_t size, void *user_data)
{
    (void)handle, (void)user_data;
    CHECK(size > 0 && has_bytes(data, size, *(const unsigned char *)data));
}

/* Allocates, checks and frees blocks until another thread stops it. */
static void *use_blocks(void *argument)
{
    const struct user *user = argument;
    soft_context_t *context = user->shared->context;
    soft_handle_t handles[16] = {0};
    for (unsigned n = 0; n < THREAD_OPERATIONS || !user->shared->stop; n++) {
        soft_handle_t *handle = &handles[n % 16];
        size_t size = 1 + (size_t)n * 37 % 3000;
        void *block = soft_pin(context, *handle);
        if (block != NULL) {
            CHECK(has_bytes(block, soft_size(context, *handle), user->byte));
            CHECK(soft_free(context, *handle) == SOFT_ERROR_PINNED && soft_unpin(context, *handle) == SOFT_OK);
        }
        soft_free(context, *handle);
        CHECK(soft_context_set_priority(context, (uint8_t)n) == SOFT_OK);
        *handle = soft_malloc(context, size);
        block = soft_pin(context, *handle);
        if (block != NULL) {
            memset(block, user->byte, size);
            CHECK(soft_unpin(context, *handle) == SOFT_OK);
        }
    }
    user->shared->running--;
    return NULL;
}

static void start_users(struct shared *shared, struct user *users, pthread_t *threads)
{
    for (int n = 0; n < THREADS; n++) {
        users[n] = (struct user){shared, n + 1};
        shared->running++;
        CHECK(pthread_create(&threads[n], NULL, use_blocks, &users[n]) == 0);
    }
}

static void join_users(const pthread_t *threads)
{
    for (int n = 0; n < THREADS; n++) {
        CHECK(pthread_join(threads[n], NULL) == 0);
    }
}

static void test_threads(void)
{
    struct shared shared = {.pool = new_pool(16)};
    struct user users[THREADS];
    pthread_t threads[THREADS];
    shared.context = soft_context_create(shared.pool, 0, check_revoked, NULL);
    start_users(&shared, users, threads);
    while (shared.running > 0) {
        CHECK(soft_grant(shared.pool, soft_revoke(shared.pool, 8)) == SOFT_OK);
        shared.stop = context_stats(shared.context).revoked_blocks > 0;
    }
    join_users(threads);
    destroy(shared.context, shared.pool);
}

/* Checks the library in a child process. */
static void check_child(const struct shared *shared, soft_handle_t handle, const char *pinned)
{
    struct soft_pool_stats stats;
    CHECK(has_bytes(pinned, 5000, 7));
    CHECK(soft_pin(shared->context, handle) == NULL);
    CHECK_LAST(SOFT_ERROR_FORKED);
    CHECK(soft_unpin(shared->context, handle) == SOFT_ERROR_FORKED);
    CHECK(soft_malloc(shared->context, 1) == 0 && soft_revoke(shared->pool, 1) == SOFT_SIZE_ERROR);
    CHECK(soft_context_destroy(shared->context) == SOFT_ERROR_FORKED);
    CHECK(soft_context_set_priority(shared->context, 1) == SOFT_ERROR_FORKED);
    CHECK(soft_pool_destroy(shared->pool) == SOFT_ERROR_FORKED);
    CHECK(soft_pool_get_stats(shared->pool, &stats) == SOFT_ERROR_FORKED);
    soft_pool_t *pool = new_pool(8);
    soft_context_t *context = new_context(pool, 0);
    new_block(context, 1000, 1);
    destroy(context, pool);
    CHECK(has_bytes(pinned, 5000, 7));
}

/* Forks while other threads hold locks of the library. */
static void test_fork(void)
{
    struct shared shared = {.pool = new_pool(64)};
    struct user users[THREADS];
    pthread_t threads[THREADS];
    shared.context = new_context(shared.pool, 0);
    soft_handle_t handle = new_block(shared.context, 5000, 7);
    const char *pinned = soft_pin(shared.context, handle);
    start_users(&shared, users, threads);
    for (int n = 0; n < FORKS; n++) {
        int status = -1;
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            check_child(&shared, handle, pinned);
            /* Ends without the leak check of Valgrind: memory that other threads of the parent own is lost here. */
            execl("/bin/true", "true", (char *)NULL);
            _exit(1);
        }
        CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    shared.stop = 1;
    join_users(threads);
    CHECK(has_bytes(pinned, 5000, 7) && soft_unpin(shared.context, handle) == SOFT_OK);
    destroy(shared.context, shared.pool);
}

int main(void)
{
    CHECK_LAST(SOFT_OK);
    test_invalid_arguments();
    test_allocation();
    test_overflow();
    test_stale_handles();
    test_exhaustion();
    test_pins();
    test_order();
    test_priority_change();
    test_callback();
    test_callback_uses_library();
    test_destruction_waits_for_callback();
    test_destroyed_objects();
    test_error_of_thread();
    test_threads();
    test_fork();
    puts("all checks passed");
    return 0;
}
