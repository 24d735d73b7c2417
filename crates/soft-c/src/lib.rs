//! C interface of soft memory. `include/tarnsoft.h` documents the functions.
//!
//! Pools and contexts have identifiers that C code sees as pointers to incomplete types. An identifier is never used
//! again, so that the functions detect the identifier of a destroyed object. Each function finds the object in a
//! [registry](mod@registry), calls the crate `soft`, and translates the result.
//!
//! | file | content |
//! |---|---|
//! | `exports.rs` | exported functions: translate arguments and results |
//! | `registry.rs` | pools and contexts of a process |
//! | `context.rs` | contexts: blocks with their pins and callback |
//! | `callback.rs` | callbacks, and their end when a context is destroyed |
//! | `objects.rs` | objects by identifier |
//! | `fork.rs` | detection of forked children |
//! | `error.rs` | error codes |

mod callback;
mod context;
mod error;
mod exports;
mod fork;
mod objects;
mod registry;
