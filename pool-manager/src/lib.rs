//! The rack's one manager: it owns the ledger, keeps it durable, drives the pool devices and answers schedulers,
//! operators and agents. What may be decided is decided in `pool` and `prediction`; here it is done.

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
