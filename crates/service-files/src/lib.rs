//! Unix sockets, certificates and folders of the services, and the limit of their file descriptors.
//! Each error names the field of the configuration file, the path and the violated rule.

pub mod certificates;
pub mod descriptors;
pub mod folders;
pub mod sockets;
