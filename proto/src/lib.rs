//! Tarn's messages and services, generated from `tarn/v1/*.proto`, and how a client sends its token. Checks and conversions
//! belong to the services.
#![forbid(unsafe_code)]

pub mod bearer;

/// Version of the protocol between manager and agent; both refuse another.
pub const PROTOCOL_VERSION: u32 = 2;

/// Package `tarn.v1`.
#[allow(missing_docs, missing_debug_implementations, clippy::all, clippy::pedantic)]
pub mod v1 {
    tonic::include_proto!("tarn.v1");
    /// Descriptors of the files of the manager's services, for gRPC reflection.
    pub const MANAGER_FILE_DESCRIPTOR_SET: &[u8] = tonic::include_file_descriptor_set!("manager");
    /// Every method: its service with the package, its name, and `unary`, `client_stream`, `server_stream` or `bidi_stream`.
    pub const METHODS: &[(&str, &str, &str)] = include!(concat!(env!("OUT_DIR"), "/methods.rs"));
}
