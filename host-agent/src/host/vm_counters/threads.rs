//! Threads of a VMM's process, and which of them run vCPUs.

use std::{fs, io};

use units::limits::VM_THREADS_INSPECTED_MAX;

/// Thread of a VMM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmThread {
    /// Identifier of the thread.
    pub id: u32,
    /// Name of the thread.
    pub name: String,
}

impl VmThread {
    /// Returns whether the thread runs a vCPU, by its name: `CPU 3/KVM` in QEMU, `vcpu3` in Cloud
    /// Hypervisor and `vmm-plugin`.
    pub fn is_vcpu(&self) -> bool {
        let qemu = self.name.strip_prefix("CPU ").and_then(|rest| rest.strip_suffix("/KVM"));
        let number = qemu.or_else(|| self.name.strip_prefix("vcpu"));
        number.is_some_and(|number| !number.is_empty() && number.bytes().all(|digit| digit.is_ascii_digit()))
    }
}

/// Lists the threads of a process in ascending order of their identifiers. Threads that end
/// meanwhile are omitted.
///
/// # Errors
/// The process has ended, or has more than [`VM_THREADS_INSPECTED_MAX`] threads.
pub fn list_threads(pid: u32) -> io::Result<Vec<VmThread>> {
    let folder = format!("/proc/{pid}/task");
    let mut threads = Vec::new();
    for entry in fs::read_dir(&folder)? {
        let name = entry?.file_name();
        let Some(id) = name.to_str().and_then(|name| name.parse().ok()) else { continue };
        let Ok(name) = fs::read_to_string(format!("{folder}/{id}/comm")) else { continue };
        if threads.len() == VM_THREADS_INSPECTED_MAX {
            return Err(io::Error::other(format!("more than {VM_THREADS_INSPECTED_MAX} threads")));
        }
        threads.push(VmThread { id, name: name.trim_end_matches('\n').to_owned() });
    }
    threads.sort_by_key(|thread| thread.id);
    Ok(threads)
}

/// Returns the identifiers of the vCPU threads of a process, in ascending order. If no thread has
/// the name of a vCPU, returns all threads: another VMM may use other names.
///
/// # Errors
/// The errors of [`list_threads`].
pub fn vcpu_threads(pid: u32) -> io::Result<Vec<u32>> {
    let threads = list_threads(pid)?;
    let has_vcpus = threads.iter().any(VmThread::is_vcpu);
    Ok(threads.iter().filter(|thread| !has_vcpus || thread.is_vcpu()).map(|thread| thread.id).collect())
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn vcpu_threads_are_recognized_by_name() {
        let is_vcpu = |name: &str| VmThread { id: 1, name: name.to_owned() }.is_vcpu();
        assert!(["CPU 0/KVM", "CPU 127/KVM", "vcpu0", "vcpu63"].into_iter().all(is_vcpu));
        assert!(
            !["CPU /KVM", "CPU 0/TCG", "vcpu", "vcpu0x", "qemu-system-x86", "vcpu-1"]
                .into_iter()
                .any(is_vcpu)
        );
    }

    #[test]
    fn only_threads_with_names_of_vcpus_are_counted() {
        let pid = std::process::id();
        let (stop, stopped) = mpsc::channel::<()>();
        let (send, id) = mpsc::channel();
        let thread = std::thread::Builder::new().name("vcpu7".to_owned()).spawn(move || {
            send.send(rustix::thread::gettid().as_raw_nonzero().get().cast_unsigned()).unwrap();
            let _ = stopped.recv();
        });
        let id = id.recv().unwrap();
        assert_eq!(vcpu_threads(pid).unwrap(), [id]);
        assert!(list_threads(pid).unwrap().len() > 1);
        drop(stop);
        thread.unwrap().join().unwrap();
    }

    #[test]
    fn all_threads_of_an_unknown_vmm_are_counted() {
        let mut child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        assert_eq!(vcpu_threads(child.id()).unwrap(), [child.id()]);
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(vcpu_threads(child.id()).is_err());
    }
}
