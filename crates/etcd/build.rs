//! Generates Rust code for the messages and services. It uses protox, so `protoc` is not needed.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    let descriptors = protox::compile(["etcd.proto"], ["proto"])?;
    tonic_prost_build::configure().compile_fds(descriptors)?; // the tests simulate a server
    Ok(())
}
