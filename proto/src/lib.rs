//! Tarn's messages and gRPC services, generated from `tarn/v1/*.proto`, and an interceptor that
//! sends a client's token. The services validate and convert the messages.
#![forbid(unsafe_code)]

pub mod bearer;

/// Version of the protocol between manager and agent. Both reject a peer with another version.
pub const PROTOCOL_VERSION: u32 = 2;

/// Generated code of the protobuf package `tarn.v1`.
#[allow(missing_docs, missing_debug_implementations, clippy::all, clippy::pedantic)]
pub mod v1 {
    tonic::include_proto!("tarn.v1");
    /// File descriptors of the manager's services, for gRPC reflection.
    pub const MANAGER_FILE_DESCRIPTOR_SET: &[u8] = tonic::include_file_descriptor_set!("manager");
    /// All gRPC methods: service with package, method name, and call type (`unary`,
    /// `client_stream`, `server_stream` or `bidi_stream`).
    pub const RPC_METHODS: &[(&str, &str, &str)] = include!(concat!(env!("OUT_DIR"), "/methods.rs"));
}
