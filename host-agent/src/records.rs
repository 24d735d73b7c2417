//! Records of the VMs that run on this host: one file per VM, `vms/RESERVATION.json`, which
//! contains the process and the memory of the VM. The agent writes the file before the process
//! receives memory. A restarted agent finds its VMs by these records.
//!
//! A record outlives its process, because a restarted agent must report the VM's end again, and must
//! not pass the VM's memory to another process. When the last slice is closed, the record is
//! rewritten without slices. It is deleted [`ENDED_VM_REPORT_DURATION`] after the VM left the desired
//! state, because a restored manager may request the VM again. The number of records is limited by
//! the active reservations of a host, and by [`ENDED_VMS_REPORTED_MAX`] for VMs that the desired
//! state does not contain; VMs with open slices are not counted.
//!
//! [`ENDED_VM_REPORT_DURATION`]: units::limits::ENDED_VM_REPORT_DURATION
//! [`ENDED_VMS_REPORTED_MAX`]: units::limits::ENDED_VMS_REPORTED_MAX

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::{Path, PathBuf},
};

use pool::{
    agent::{Process, RecoveredVm, VmRecord},
    protocol::{Handle, Holding},
};
use serde::{Deserialize, Serialize};
use units::{Bytes, Epoch, Name, ReservationId, SliceId, UserId};

use crate::{
    host::{
        cgroup::Cgroups,
        process::{ProcessError, ProcessHandle},
        sysfs::{Sysfs, SysfsError},
    },
    protected_dir::{PRIVATE_MODE, ProtectedDir},
    runtime_dir::{
        RUNTIME_DIR_FIELD, RuntimeDirError, io_error, read_state, sync_parent_directory, write_durably,
    },
};

/// Reason why records cannot be used. The agent then does not start, because it must not assume
/// that no VM runs.
#[derive(Debug, thiserror::Error)]
pub enum RecordsError {
    /// The operating system rejected an operation.
    #[error(transparent)]
    Dir(#[from] RuntimeDirError),
    /// A file is not a valid record.
    #[error("{} is not a record of a VM: end the VM of this reservation, then remove the file", path.display())]
    Corrupt {
        /// Path of the file.
        path: PathBuf,
        /// Invalid contents.
        #[source]
        cause: RecordParseError,
    },
    /// A file in the directory of the records has another name than a record.
    #[error("{} is not a record of a VM: the records are files named RESERVATION.json; remove it", path.display())]
    Foreign {
        /// Path of the file.
        path: PathBuf,
    },
    /// It cannot be determined whether the process of a VM runs.
    #[error("cannot find the process of {}", path.display())]
    Process {
        /// Path of the VM's record.
        path: PathBuf,
        /// Cause.
        #[source]
        cause: ProcessError,
    },
}

/// Invalid contents of a record.
#[derive(Debug, thiserror::Error)]
pub enum RecordParseError {
    /// The file is not JSON, or has unknown or missing keys.
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    /// A value is invalid.
    #[error("{field}: {problem}")]
    Field {
        /// Key of the value.
        field: &'static str,
        /// Invalid value, and the rule that it violates.
        problem: String,
    },
}

/// Store of the VM records of one host.
#[derive(Clone, Debug)]
pub struct Records {
    directory: PathBuf,
    boot_id: String,
}

/// File format of a record. Unknown keys are errors, because another version wrote them.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StoredRecord {
    reservation: String,
    vm: String,
    pid: u32,
    started_ticks: u64,
    boot_id: String,
    cgroup: String,
    local_bytes: u64,
    pinned: bool,
    /// User of the VM. Absent if the VM belongs to the agent's user, and in records of earlier
    /// versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    uid: Option<UserId>,
    /// Path of the VMM's control socket. Absent if the VMM reported none, and in records of earlier
    /// versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    control_socket: Option<String>,
    /// Whether the pool memory was moved to local memory. Absent if it was not, and in records of
    /// earlier versions.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    is_rehomed: bool,
    slices: Vec<StoredSlice>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StoredSlice {
    slice: u32,
    epoch: u64,
    emc: String,
    handle: String,
}

impl Records {
    /// Returns the path of the directory with the records of an agent.
    pub fn directory(runtime_dir: &Path) -> PathBuf {
        runtime_dir.join("vms")
    }

    /// Opens the records in the runtime directory of an agent. `boot_id` is the current boot of the
    /// machine: processes of other boots have ended.
    ///
    /// # Errors
    /// The directory of the records cannot be created, or another user can change it.
    pub fn open(runtime_dir: &Path, boot_id: &str) -> Result<Self, RecordsError> {
        let directory = Self::directory(runtime_dir);
        ProtectedDir::create(RUNTIME_DIR_FIELD, &directory, PRIVATE_MODE).map_err(RuntimeDirError::from)?;
        Ok(Self { directory, boot_id: boot_id.to_owned() })
    }

    /// Returns all recorded VMs, and whether their processes still run.
    ///
    /// # Errors
    /// A record cannot be read, or it cannot be determined whether a process runs.
    pub fn load(&self) -> Result<Vec<RecoveredVm>, RecordsError> {
        let list = || io_error("list", &self.directory);
        let mut vms = Vec::new();
        for entry in fs::read_dir(&self.directory).map_err(list())? {
            let path = entry.map_err(list())?.path();
            if path.extension().is_some_and(|extension| extension == "new") {
                // The write was interrupted. The earlier record, if any, is still complete.
                fs::remove_file(&path).map_err(io_error("remove", &path))?;
            } else if has_record_name(&path) {
                vms.push(self.load_record(path)?);
            } else {
                return Err(RecordsError::Foreign { path });
            }
        }
        Ok(vms)
    }

    fn load_record(&self, path: PathBuf) -> Result<RecoveredVm, RecordsError> {
        let (record, boot_id) = read(&path)?;
        let is_alive = boot_id == self.boot_id
            && ProcessHandle::open(&record.process)
                .map_err(|cause| RecordsError::Process { path, cause })?
                .is_some();
        Ok(RecoveredVm { record, is_alive })
    }

    /// Writes a record durably.
    ///
    /// # Errors
    /// The record cannot be written durably. The file may exist, but can be lost in a crash.
    pub fn write(&self, record: &VmRecord) -> Result<(), RecordsError> {
        let bytes = serde_json::to_vec_pretty(&self.to_stored_record(record))
            .expect("a record of numbers and strings can be serialized");
        Ok(write_durably(&self.path(record.reservation), &bytes)?)
    }

    /// Removes a record, if it exists.
    ///
    /// # Errors
    /// The file of the record cannot be removed.
    pub fn remove(&self, reservation: ReservationId) -> Result<(), RecordsError> {
        let path = self.path(reservation);
        match fs::remove_file(&path) {
            Err(errno) if errno.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(errno) => Err(io_error("remove", path)(errno).into()),
            Ok(()) => Ok(sync_parent_directory(&path)?),
        }
    }

    fn path(&self, reservation: ReservationId) -> PathBuf {
        self.directory.join(format!("{reservation}.json"))
    }

    fn to_stored_record(&self, record: &VmRecord) -> StoredRecord {
        let slice = |(holding, handle): (&Holding, &Handle)| StoredSlice {
            slice: holding.slice.0,
            epoch: holding.epoch.0,
            emc: handle.emc.to_string(),
            handle: handle.place.to_string(),
        };
        StoredRecord {
            reservation: record.reservation.to_string(),
            vm: record.vm.to_string(),
            pid: record.process.pid,
            started_ticks: record.process.started,
            boot_id: self.boot_id.clone(),
            cgroup: record.process.cgroup.clone(),
            local_bytes: record.local.get(),
            pinned: record.pinned,
            uid: record.uid,
            control_socket: record.control_socket.clone(),
            is_rehomed: record.is_rehomed,
            slices: record.slices.iter().map(slice).collect(),
        }
    }
}

/// Returns the VMs recorded in the runtime directory of an agent, without changing any file.
/// Returns no VMs if the directory does not exist.
///
/// # Errors
/// A record cannot be read, or has invalid contents.
pub fn recorded_vms(runtime_dir: &Path) -> Result<Vec<VmRecord>, RecordsError> {
    let directory = runtime_dir.join("vms");
    let listed = match fs::read_dir(&directory) {
        Err(errno) if errno.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        listed => listed.map_err(io_error("list", &directory))?,
    };
    let paths = listed.filter_map(Result::ok).map(|entry| entry.path());
    paths.filter(|path| has_record_name(path)).map(|path| Ok(read(&path)?.0)).collect()
}

/// Returns the cgroups of recorded VMs, except VMs that have certainly ended, and the cgroup of the agent. They
/// are no tenants. `proc` is the root of procfs.
///
/// # Errors
/// A record, or the cgroup of a running VM, cannot be read.
pub(crate) fn cgroups_of_vms_and_agent<E: From<RecordsError> + From<SysfsError>>(
    runtime_dir: &Path,
    cgroups: &Cgroups,
    proc: &Sysfs,
) -> Result<BTreeSet<String>, E> {
    let vms = recorded_vms(runtime_dir)?.into_iter();
    let running = vms.filter(|vm| !matches!(ProcessHandle::open(&vm.process), Ok(None)));
    let processes = running.map(|vm| vm.process.pid).chain([std::process::id()]);
    let cgroups = processes.map(|pid| cgroups.tenant_of(proc, pid));
    Ok(cgroups.collect::<Result<Vec<_>, _>>()?.into_iter().flatten().collect())
}

fn has_record_name(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "json")
}

fn read(path: &Path) -> Result<(VmRecord, String), RecordsError> {
    let missing = || io_error("read", path)(io::ErrorKind::NotFound.into());
    let bytes = read_state(path)?.ok_or_else(missing)?;
    parse_record(&bytes).map_err(|cause| RecordsError::Corrupt { path: path.to_owned(), cause })
}

/// Parses a record. Returns the VM and the boot id of its process.
fn parse_record(bytes: &[u8]) -> Result<(VmRecord, String), RecordParseError> {
    let stored: StoredRecord = serde_json::from_slice(bytes)?;
    let field = |field| move |problem| RecordParseError::Field { field, problem };
    let reservation = stored.reservation.parse().map_err(field("reservation"))?;
    let vm = Name::new(&stored.vm).map_err(|error| field("vm")(error.to_string()))?;
    let slices: BTreeMap<Holding, Handle> = stored.slices.into_iter().map(parse_slice).collect();
    let process = Process { pid: stored.pid, started: stored.started_ticks, cgroup: stored.cgroup };
    let local = Bytes::new(stored.local_bytes);
    let (pinned, uid, control_socket) = (stored.pinned, stored.uid, stored.control_socket);
    let is_rehomed = stored.is_rehomed;
    let record =
        VmRecord { reservation, vm, process, local, pinned, uid, slices, control_socket, is_rehomed };
    Ok((record, stored.boot_id))
}

fn parse_slice(stored: StoredSlice) -> (Holding, Handle) {
    let holding = Holding { slice: SliceId(stored.slice), epoch: Epoch(stored.epoch) };
    (holding, Handle::new(stored.emc, stored.handle))
}

/// Records for tests.
#[cfg(test)]
pub(crate) mod fake {
    use super::*;
    use crate::host::process::identify_process;

    /// Returns the record of a VM whose process has this identifier.
    pub(crate) fn vm_record(pid: u32) -> VmRecord {
        let slice = |slice| (Holding { slice: SliceId(slice), epoch: Epoch(1) }, Handle::new("emc", ""));
        VmRecord {
            reservation: ReservationId(1),
            vm: Name::new("vm").unwrap(),
            process: identify_process(pid).unwrap(),
            local: Bytes::mib(64),
            pinned: false,
            uid: None,
            slices: [1, 2].map(slice).into(),
            control_socket: None,
            is_rehomed: false,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;
    use crate::host::process;

    fn record(process: Process) -> VmRecord {
        let holding = Holding { slice: SliceId(17), epoch: Epoch(42) };
        VmRecord {
            reservation: ReservationId(7),
            vm: Name::new("vm:1").unwrap(),
            process,
            local: Bytes::mib(64),
            pinned: true,
            uid: UserId::new(2001).ok(),
            slices: BTreeMap::from([(holding, Handle::new("emc", "/emc/slices/00017.42.h0"))]),
            control_socket: Some("/run/tarn-vm/vm:1.sock".to_owned()),
            is_rehomed: true,
        }
    }

    #[test]
    fn recorded_vm_is_alive_until_its_process_ends() {
        let dir = tempfile::tempdir().unwrap();
        let records = Records::open(dir.path(), "boot").unwrap();
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let record = record(process::identify_process(child.id()).unwrap());
        records.write(&record).unwrap();
        assert_eq!(records.load().unwrap(), [RecoveredVm { record: record.clone(), is_alive: true }]);
        let rebooted = Records::open(dir.path(), "another boot").unwrap();
        assert_eq!(rebooted.load().unwrap(), [RecoveredVm { record: record.clone(), is_alive: false }]);
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(records.load().unwrap(), [RecoveredVm { record, is_alive: false }]);
    }

    #[test]
    fn record_removal_is_idempotent() {
        let dir = tempfile::tempdir().unwrap();
        let records = Records::open(dir.path(), "boot").unwrap();
        let record = record(Process { pid: 1, started: 1, cgroup: String::new() });
        records.write(&record).unwrap();
        records.remove(record.reservation).unwrap();
        records.remove(record.reservation).unwrap();
        assert_eq!(records.load().unwrap(), []);
    }

    #[test]
    fn corrupt_record_is_an_error_with_its_path() {
        let dir = tempfile::tempdir().unwrap();
        let records = Records::open(dir.path(), "boot").unwrap();
        records.write(&record(Process { pid: 1, started: 1, cgroup: String::new() })).unwrap();
        let path = dir.path().join("vms/r-7.json");
        let good = fs::read_to_string(&path).unwrap();
        for (bad, reason) in [
            (good[..good.len() / 2].to_owned(), "EOF"),
            (good.replace("r-7", "7"), "reservation: \"7\" is not a reservation"),
            (good.replace("vm:1", "../vm"), "vm: \"../vm\" is not a name"),
            (good.replace("cgroup", "cgroups"), "unknown field `cgroups`"),
            (good.replace("2001", "4294967295"), "4294967295 is not a user id"),
            (String::new(), "EOF"),
        ] {
            fs::write(&path, bad).unwrap();
            let error = units::chain(&records.load().unwrap_err());
            assert!(error.contains("vms/r-7.json") && error.contains(reason), "{error}");
        }
    }

    #[test]
    fn file_that_is_not_a_record_is_an_error_with_advice() {
        let dir = tempfile::tempdir().unwrap();
        let records = Records::open(dir.path(), "boot").unwrap();
        let path = dir.path().join("vms/readme");
        fs::write(&path, "").unwrap();
        let error = units::chain(&records.load().unwrap_err());
        assert!(error.ends_with("the records are files named RESERVATION.json; remove it"), "{error}");
        fs::remove_file(&path).unwrap();
        let path = dir.path().join("vms/r-1.json");
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mkfifoat(rustix::fs::CWD, &path, mode).unwrap();
        let error = units::chain(&records.load().unwrap_err());
        assert!(error.ends_with("r-1.json: must be a regular file"), "{error}");
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        let error = units::chain(&records.load().unwrap_err());
        assert!(error.ends_with("r-1.json: must be a regular file"), "{error}");
    }

    #[test]
    fn record_without_optional_values_has_the_format_of_earlier_versions() {
        let dir = tempfile::tempdir().unwrap();
        let records = Records::open(dir.path(), "boot").unwrap();
        let process = Process { pid: 1, started: 1, cgroup: String::new() };
        let record = VmRecord { uid: None, control_socket: None, is_rehomed: false, ..record(process) };
        records.write(&record).unwrap();
        let text = fs::read_to_string(dir.path().join("vms/r-7.json")).unwrap();
        assert!(["uid", "control_socket", "is_rehomed"].iter().all(|key| !text.contains(key)), "{text}");
        assert_eq!(recorded_vms(dir.path()).unwrap(), [record]);
    }

    #[test]
    fn partly_written_record_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let records = Records::open(dir.path(), "boot").unwrap();
        fs::write(dir.path().join("vms/r-7.new"), "{ \"reser").unwrap();
        assert_eq!(records.load().unwrap(), []);
        assert_eq!(fs::read_dir(dir.path().join("vms")).unwrap().count(), 0);
    }
}
