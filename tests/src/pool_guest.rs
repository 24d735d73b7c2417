//! Small guest of a rack of processes, with pool memory and a real VMM.

use std::{
    fs,
    path::PathBuf,
    process::{Child, Command, Stdio},
};

use proto::v1 as wire;

use crate::{
    rack::{Rack, programs_dir, reserve_request, vm_ref},
    standalone_vm::confine_command,
};

/// VMM process of a guest on host h0 with 64 MiB of local memory and 1 GiB of pool memory. Dropping
/// the value kills the process.
#[derive(Debug)]
pub struct PoolGuest {
    /// Process of the VMM.
    pub process: Child,
    console: PathBuf,
}

impl PoolGuest {
    /// Reserves the memory of a VM, commits the reservation and starts the guest. The ID of the
    /// request is the name of the VM.
    pub async fn start(rack: &Rack, vm: &str, kernel: Vec<u8>) -> Self {
        Self::start_as(rack, vm, vm, kernel).await
    }

    /// Like [`PoolGuest::start`], with another ID of the request.
    pub async fn start_as(rack: &Rack, vm: &str, request_id: &str, kernel: Vec<u8>) -> Self {
        let request = wire::ReserveRequest {
            local_bytes: 64 << 20,
            wait_ready: true,
            ..reserve_request("h0", vm, 1, request_id)
        };
        rack.scheduler().await.reserve(request).await.expect("the rack has free memory");
        let commit = wire::CommitRequest { target: vm_ref(vm) };
        rack.scheduler().await.commit(commit).await.expect("the reservation is ready");
        let path = rack.dir().join(format!("{vm}.kernel"));
        fs::write(&path, kernel).expect("the folder is writable");
        let console = rack.dir().join(format!("{vm}.console"));
        let mut command = Command::new(programs_dir().join("vmm-plugin"));
        confine_command(command.arg("run"));
        command.args(["--vm", vm, "--agent"]).arg(rack.host_memory_socket(0));
        command.arg("--serial").arg(format!("file={}", console.display()));
        command.arg("--kernel").arg(path).arg("--run-dir").arg(rack.dir().join("run"));
        let process = command.stdin(Stdio::null()).spawn().expect("vmm-plugin starts");
        Self { process, console }
    }

    /// Returns the console output of the guest so far.
    pub fn console(&self) -> String {
        fs::read_to_string(&self.console).unwrap_or_default()
    }

    /// Returns whether the process has a mapping of a slice. The driver of the EMCs must be
    /// `emulated`.
    pub fn maps_slice(&self) -> bool {
        let maps = fs::read_to_string(format!("/proc/{}/maps", self.process.id())).unwrap_or_default();
        maps.contains("/slices/")
    }
}

impl Drop for PoolGuest {
    fn drop(&mut self) {
        let _ = self.process.kill(); // fails only if the process has already ended
        let _ = self.process.wait();
    }
}
