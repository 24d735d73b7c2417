//! Tests that run the binary `tarn` against a fake manager with fixed responses.
#![allow(missing_docs, clippy::unwrap_used, reason = "test crate")]

mod errors;
mod evaluate;
mod evictions;
mod explain_tenant;
mod help;
mod output;
mod rack;
mod requests;
mod shares;
mod soft_memory;
mod tenants;
mod terminal;
mod tiering;
mod transports;
