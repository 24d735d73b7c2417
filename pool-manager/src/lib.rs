//! Manager of a rack: it owns the ledger, makes it durable, drives the EMCs, and serves schedulers,
//! operators and agents. Decisions are made in `pool` and `prediction`; this crate performs them.

pub mod config;
pub mod convert;
pub mod device;
pub mod driver;
pub mod emc;
pub mod forecasts;
pub mod founding;
pub mod keeper;
pub mod mark;
pub mod metrics;
pub mod offline;
pub mod plan;
pub mod power_off;
pub mod records;
pub mod role;
pub mod rpc;
pub mod serve;
pub mod shares;
pub mod store;
pub mod tls;
pub mod tokens;
