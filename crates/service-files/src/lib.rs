//! Parts that the manager and the agent share: Unix sockets, certificates, folders, the limit of file
//! descriptors, and limits of log lines. Errors of sockets and certificates name the field of the
//! configuration file, the path and the violated rule; errors of folders are only the rule.

pub mod certificates;
pub mod client_certificates;
pub mod descriptors;
pub mod folders;
pub mod log_limit;
pub mod sockets;
