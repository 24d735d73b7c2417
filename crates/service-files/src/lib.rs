//! Unix sockets and certificates of the services. Each error names the field of the configuration
//! file, the path and the violated rule.

pub mod certificates;
pub mod sockets;
