/*
 * C interface of soft memory (libtarnsoft): memory blocks that can be taken away at any time, for caches and other
 * state that a program can rebuild.
 *
 * A pool limits the pages of 4 KiB that its contexts use together to a budget. A context has its own heap of
 * blocks. soft_revoke() takes pages away from the pool: the contexts with the lowest priority lose their oldest
 * blocks first. A callback of the context receives each of these blocks before it is lost.
 *
 * A block is addressed by a handle. soft_pin() returns a pointer to the block, or NULL if the block was revoked. The
 * pointer is valid until the matching soft_unpin(). Pinned blocks are not revoked.
 *
 *     soft_pool_t *pool = soft_pool_create(256);
 *     soft_context_t *context = soft_context_create(pool, 0, NULL, NULL);
 *     soft_handle_t handle = soft_malloc(context, 100);
 *     char *text = soft_pin(context, handle);
 *     if (text != NULL) {
 *         strcpy(text, "cached");
 *         soft_unpin(context, handle);
 *     }
 *
 * Errors. Each function that fails sets the error of the calling thread, which soft_last_error() returns. A
 * function that succeeds does not change it. Functions with the result int return 0 or the error. A function that
 * fails changes nothing else.
 *
 * Identifiers. A soft_pool_t * or soft_context_t * is an identifier, not an address. It is never used again in a
 * process. The functions therefore detect NULL and the identifiers of destroyed pools and contexts. Other values,
 * for example pointers to other objects, are also rejected unless they are equal to an identifier by chance.
 *
 * Threads. All functions can be called by all threads at the same time, also with the same pool, context or handle.
 * The contents of a pinned block belong to the program: threads that access the same block must synchronize.
 *
 * Fork. In a child process, all functions reject the pools and contexts of the parent with SOFT_ERROR_FORKED. The
 * child has a private copy of the blocks that were pinned, and can use their pointers until it ends. It can
 * create pools and contexts of its own. This needs a child of fork(), which runs handlers of pthread_atfork(). A child
 * of vfork() must call no function.
 *
 * Failures that end the process. Like many programs, the library calls abort() if ordinary memory is exhausted. An
 * internal error, which is a bug, does not leave the library: the function fails with SOFT_ERROR_INTERNAL, and a
 * message is written to stderr.
 *
 * The functions are not async-signal-safe, except soft_version() and soft_error_string().
 */

#ifndef TARNSOFT_H
#define TARNSOFT_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Identifier of a pool. */
typedef struct soft_pool soft_pool_t;

/* Identifier of a context. */
typedef struct soft_context soft_context_t;

/*
 * Handle of a block in its context. 0 is not a handle. The handle of a freed or revoked block is detected and never
 * becomes valid again. A handle must be used only with the context that returned it: another context can have a
 * block with the same handle.
 */
typedef uint64_t soft_handle_t;

/* Errors. The numbers do not change within a version of the soname. New errors may be added. */
enum soft_error {
    SOFT_OK = 0,
    /* A pointer or identifier is NULL, or a handle is 0. */
    SOFT_ERROR_INVALID_ARGUMENT = 1,
    /* The pool was destroyed, or the identifier is not of a pool. */
    SOFT_ERROR_INVALID_POOL = 2,
    /* The context was destroyed, or the identifier is not of a context. */
    SOFT_ERROR_INVALID_CONTEXT = 3,
    /* The block was freed (also: double free) or revoked, or the context has never returned the handle. */
    SOFT_ERROR_STALE_HANDLE = 4,
    /* The block, or a block of the context, is pinned. */
    SOFT_ERROR_PINNED = 5,
    /* The block has no pin that could be removed. */
    SOFT_ERROR_NOT_PINNED = 6,
    /* The context has 65,536 pinned blocks, or the block has 2^32 - 1 pins. */
    SOFT_ERROR_TOO_MANY_PINS = 7,
    /* The budget of the pool does not suffice. */
    SOFT_ERROR_OUT_OF_BUDGET = 8,
    /* The pool has no free address range of this length. See soft_pool_create() and soft_pool_connect(). */
    SOFT_ERROR_OUT_OF_ADDRESS_SPACE = 9,
    /* A block has at most 2^32 - 1 bytes, and a pool at most 2^24 pages (64 GiB). */
    SOFT_ERROR_TOO_LARGE = 10,
    /* A process has at most 1024 pools and 65,536 contexts, and a context at most 2^30 blocks. */
    SOFT_ERROR_TOO_MANY = 11,
    /* The operating system refused the address space or the handler for fork(), or has no pages of 4 KiB. */
    SOFT_ERROR_SYSTEM = 12,
    /* The pool or context is from the parent process. */
    SOFT_ERROR_FORKED = 13,
    /* Bug of the library. */
    SOFT_ERROR_INTERNAL = 14,
    /* The soft memory daemon cannot be reached, or refused the process. */
    SOFT_ERROR_DAEMON = 15,
    /* The process has a connected pool already, or contexts of a destroyed connected pool. */
    SOFT_ERROR_ALREADY_CONNECTED = 16,
};

/* Result of functions with the result size_t that fail. */
#define SOFT_SIZE_ERROR SIZE_MAX

/*
 * Function that receives a block before it is lost: its handle, which is already invalid, its bytes, which are
 * readable until the function returns, its size, and the argument of soft_context_create(). `data` is a multiple of 16.
 * It is not the address that soft_pin() returned.
 *
 * The function runs in the thread that calls soft_revoke() or soft_reclaim(), or in a thread of the library, and in
 * several threads at the same time if several threads revoke. It runs without a lock, so it may block, and may call
 * all functions of this file. soft_malloc() in a callback fails if the budget does not suffice. A revocation
 * continues with blocks of other callbacks only after the function has returned.
 *
 * The function must return: longjmp() is undefined, and a C++ exception that leaves the function ends the process.
 */
typedef void (*soft_revoke_callback_t)(soft_handle_t handle, const void *data, size_t size, void *user_data);

/* Pages of a pool. */
struct soft_pool_stats {
    /* Maximum number of pages that the contexts may hold. */
    size_t budget_pages;
    /* Pages that the contexts hold. Exceeds the budget only during soft_revoke(). */
    size_t held_pages;
};

/* Use of a context. */
struct soft_context_stats {
    /* Number of blocks. */
    size_t blocks;
    /* Pages that count against the budget of the pool. */
    size_t held_pages;
    /* Number of blocks that were revoked since the context was created. */
    uint64_t revoked_blocks;
};

/* Returns the version of the library, such as "0.1.0". */
const char *soft_version(void);

/* Returns the last error of the calling thread (enum soft_error), or SOFT_OK if no function has failed. */
int soft_last_error(void);

/* Returns a description of an error in English. The string is constant. Returns "unknown error" for other numbers. */
const char *soft_error_string(int error);

/*
 * Returns a description of the last error of the calling thread. For SOFT_ERROR_DAEMON, it contains the path of the
 * socket and the reason, for example that the user is not permitted. The string is valid until the thread calls
 * soft_pool_connect() or ends, in the main thread also in functions of atexit().
 */
const char *soft_last_error_message(void);

/*
 * Creates a pool with a budget in pages, which may be 0, and reserves address space for 4 times the budget, at least
 * 64 MiB.
 *
 * Returns NULL on failure: SOFT_ERROR_TOO_LARGE, SOFT_ERROR_TOO_MANY, SOFT_ERROR_SYSTEM.
 */
soft_pool_t *soft_pool_create(size_t budget_pages);

/*
 * Connects to the soft memory daemon of the host (`soft_memory.socket` of the host agent), and creates a pool without
 * budget. Allocations request budget from the daemon, up to `budget_pages_max` pages, and wait for the answer: 3 seconds
 * if the daemon does not answer. The library starts a thread, which revokes blocks for other processes and runs the
 * callbacks. The address space is 4 times `budget_pages_max`, at least 64 MiB. If the connection ends, the pool keeps its
 * budget, and connects again. If the daemon refuses the process for 5 seconds, the pool gives its budget up.
 *
 * A process has at most one connected pool. A pool stays connected while it or one of its contexts exists. The function
 * waits up to 3 seconds for the end of an earlier connection, and then fails with SOFT_ERROR_ALREADY_CONNECTED.
 *
 * Returns NULL on failure: SOFT_ERROR_INVALID_ARGUMENT, SOFT_ERROR_DAEMON, SOFT_ERROR_ALREADY_CONNECTED, or an error of
 * soft_pool_create().
 */
soft_pool_t *soft_pool_connect(const char *path, size_t budget_pages_max);

/*
 * Destroys a pool. Its contexts stay usable, and its memory is returned when the last of them is destroyed. Without
 * the pool, no pages can be revoked except with soft_reclaim(), and by the daemon: the contexts of a connected pool keep it
 * connected. The destruction of a connected pool and its last context waits for the end of the thread of the library, at
 * most 1 second, except inside a callback.
 *
 * Errors: SOFT_ERROR_INVALID_ARGUMENT, SOFT_ERROR_INVALID_POOL, SOFT_ERROR_FORKED, as of all functions with a pool.
 */
int soft_pool_destroy(soft_pool_t *pool);

/* Stores the numbers of pages of a pool. */
int soft_pool_get_stats(soft_pool_t *pool, struct soft_pool_stats *stats);

/*
 * Adds pages to the budget of a pool. Do not add pages to a connected pool: the daemon does not know them, and the memory
 * of the host may not suffice for them. Fails with SOFT_ERROR_TOO_LARGE if the budget would exceed 2^24 pages.
 */
int soft_grant(soft_pool_t *pool, size_t pages);

/*
 * Takes pages away from the budget of a pool, and returns the number of these pages, or SOFT_SIZE_ERROR. The result is
 * at most SIZE_MAX - 1, also for a larger budget. The pages of a connected pool return to the daemon.
 *
 * Uses in this order: unused budget; pages without blocks; pages with blocks, of contexts with ascending priority and,
 * at equal priority, of the oldest context first. The result is smaller than `pages` only if the budget is used up,
 * if the remaining blocks are pinned, or if callbacks and other threads allocate blocks meanwhile.
 */
size_t soft_revoke(soft_pool_t *pool, size_t pages);

/*
 * Creates a context without blocks in a pool. A revocation takes blocks of contexts with a low priority first. The
 * callback may be NULL.
 *
 * Returns NULL on failure: an error of the pool, or SOFT_ERROR_TOO_MANY.
 */
soft_context_t *soft_context_create(soft_pool_t *pool, uint8_t priority, soft_revoke_callback_t callback,
                                    void *user_data);

/*
 * Destroys a context, and frees all its blocks without the callback. Waits until no callback of the context runs, and
 * prevents further calls, so that the program can then free `user_data`. The caller must hold no lock for which the
 * callback waits. Exception: if the calling thread runs a callback itself, of any context, the function does not wait,
 * and callbacks in other threads may still run.
 *
 * Errors: SOFT_ERROR_PINNED if a block is pinned, and SOFT_ERROR_INVALID_ARGUMENT, SOFT_ERROR_INVALID_CONTEXT,
 * SOFT_ERROR_FORKED, as of all functions with a context.
 */
int soft_context_destroy(soft_context_t *context);

/*
 * Changes the priority of a context. The next soft_revoke() uses it. A revocation that runs already uses the old one.
 *
 * Errors: an error of the context.
 */
int soft_context_set_priority(soft_context_t *context, uint8_t priority);

/* Stores the use of a context. */
int soft_context_get_stats(soft_context_t *context, struct soft_context_stats *stats);

/*
 * Allocates a block of `size` bytes, which are zero. Its address is a multiple of 16. A block of 0 bytes has a handle
 * and can be pinned, but has no bytes. Each block needs about 40 bytes of ordinary memory.
 *
 * Returns 0 on failure: an error of the context, SOFT_ERROR_OUT_OF_BUDGET, SOFT_ERROR_OUT_OF_ADDRESS_SPACE,
 * SOFT_ERROR_TOO_LARGE or SOFT_ERROR_TOO_MANY. A failed allocation revokes no blocks: to exchange old blocks for a new
 * one, call soft_reclaim() and try again.
 */
soft_handle_t soft_malloc(soft_context_t *context, size_t size);

/*
 * Allocates a block of `count * size` bytes, which are zero. Fails with SOFT_ERROR_TOO_LARGE if the product overflows.
 * Otherwise as soft_malloc().
 */
soft_handle_t soft_calloc(soft_context_t *context, size_t count, size_t size);

/*
 * Frees a block without the callback. Its bytes are lost.
 *
 * Errors: an error of the context, SOFT_ERROR_INVALID_ARGUMENT for the handle 0, SOFT_ERROR_STALE_HANDLE,
 * SOFT_ERROR_PINNED.
 */
int soft_free(soft_context_t *context, soft_handle_t handle);

/*
 * Pins a block, and returns its address. The block becomes the youngest one of its context. Until the block is unpinned
 * as often as it was pinned, it is not revoked, not moved and not freed. The address may be another one after that.
 *
 * While blocks of a context are pinned, a revocation cannot move its blocks together, and may revoke more blocks for the
 * same number of pages. Pins should therefore be short.
 *
 * Returns NULL on failure: an error of the context, SOFT_ERROR_INVALID_ARGUMENT for the handle 0, SOFT_ERROR_STALE_HANDLE
 * if the block was freed or revoked, SOFT_ERROR_TOO_MANY_PINS.
 */
void *soft_pin(soft_context_t *context, soft_handle_t handle);

/*
 * Removes a pin of a block. Pins belong to the block, not to a thread.
 *
 * Errors: an error of the context, SOFT_ERROR_INVALID_ARGUMENT for the handle 0, SOFT_ERROR_NOT_PINNED,
 * SOFT_ERROR_STALE_HANDLE.
 */
int soft_unpin(soft_context_t *context, soft_handle_t handle);

/* Returns the size of a block in bytes, as requested, or SOFT_SIZE_ERROR with an error as of soft_free(). */
size_t soft_size(soft_context_t *context, soft_handle_t handle);

/*
 * Revokes the oldest blocks of a context until `pages` pages are free, and returns the number of freed pages, or
 * SOFT_SIZE_ERROR. Frees pages without blocks first. The budget of the pool does not change, so the pages can be used
 * for other blocks of the pool.
 */
size_t soft_reclaim(soft_context_t *context, size_t pages);

#ifdef __cplusplus
}
#endif

#endif
