//! Generates Rust code for the messages and services. It uses protox, so `protoc` is not needed.

use std::{env, fs, path::PathBuf};

use protox::prost::Message as _;

/// Protobuf files of the manager's services.
const MANAGER_PROTO_FILES: [&str; 9] = [
    "tarn/v1/common.proto",
    "tarn/v1/scheduler.proto",
    "tarn/v1/admin.proto",
    "tarn/v1/agent.proto",
    "tarn/v1/models.proto",
    "tarn/v1/shares.proto",
    "tarn/v1/tenants.proto",
    "tarn/v1/evictions.proto",
    "tarn/v1/soft_memory.proto",
];
/// Protobuf files of the services on a host.
const HOST_PROTO_FILES: [&str; 2] = ["tarn/v1/host_memory.proto", "tarn/v1/vmm.proto"];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=tarn");
    let mut compiler = protox::Compiler::new(["."])?;
    compiler.include_source_info(true).include_imports(true).open_files(MANAGER_PROTO_FILES)?;
    let out = PathBuf::from(env::var("OUT_DIR")?);
    fs::write(out.join("manager.bin"), compiler.file_descriptor_set().encode_to_vec())?;
    let descriptors = compiler.open_files(HOST_PROTO_FILES)?.file_descriptor_set();
    let methods = descriptors.file.iter().flat_map(|file| {
        file.service.iter().flat_map(|service| {
            service.method.iter().map(|method| {
                let kind = match (method.client_streaming(), method.server_streaming()) {
                    (false, false) => "unary",
                    (true, false) => "client_stream",
                    (false, true) => "server_stream",
                    (true, true) => "bidi_stream",
                };
                let service = format!("{}.{}", file.package(), service.name());
                format!("({service:?}, {:?}, {kind:?}),\n", method.name())
            })
        })
    });
    fs::write(out.join("methods.rs"), format!("&[{}]", methods.collect::<String>()))?;
    tonic_prost_build::configure().compile_fds(descriptors)?;
    Ok(())
}
