//! Processes of this machine: their identity, their end, the files that they have open, and their
//! mappings. A process is identified by its pid, its start time and the boot of the machine,
//! because pids are reused.

use std::{
    collections::BTreeSet,
    fs::{self, File, OpenOptions},
    io::{self, BufRead as _, BufReader},
    ops::Range,
    os::{
        fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd},
        unix::fs::{FileTypeExt as _, MetadataExt},
    },
    path::{Path, PathBuf},
};

use pool::agent::Process;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::{
        FileType, MemfdFlags, Mode, OFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, memfd_create,
    },
    io::Errno,
    process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
};

use units::UserId;

use crate::user::current_user;

/// Seals of memfds created by [`make_memfd`]. A sealed memfd cannot grow, but it can be truncated
/// to take the memory from its users.
const MEMFD_SEALS: SealFlags = SealFlags::GROW.union(SealFlags::SEAL);

/// Maximum number of threads of a process that are examined because the previous one has ended.
const THREADS_EXAMINED_MAX: usize = 16;

/// Error of the inspection of a process.
#[derive(Debug, thiserror::Error)]
pub enum ProcessError {
    /// The operating system rejected an operation.
    #[error("cannot {operation} {}", path.display())]
    Io {
        /// Operation, such as `read`.
        operation: &'static str,
        /// File or object of the operation.
        path: PathBuf,
        /// Cause.
        #[source]
        errno: io::Error,
    },
    /// A file in /proc has unexpected contents.
    #[error("{} has unexpected contents {text:?}", path.display())]
    Unreadable {
        /// Path of the file.
        path: PathBuf,
        /// Contents of the file.
        text: String,
    },
    /// The process has ended.
    #[error("process {pid} has ended")]
    Gone {
        /// Identifier of the process.
        pid: u32,
    },
    /// Another user than the one that connected runs the process with this pid. The process that
    /// connected has ended, or it has changed its user.
    #[error("process {pid} belongs to user {user}, but user {peer} opened this connection: connect again")]
    OtherUser {
        /// Identifier of the process.
        pid: u32,
        /// Effective user of the process.
        user: u32,
        /// User that opened the connection.
        peer: UserId,
    },
}

fn io_error(operation: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> ProcessError {
    let path = path.into();
    move |errno| ProcessError::Io { operation, path, errno }
}

/// Returns the boot id of the kernel, which changes when the machine restarts.
///
/// # Errors
/// The file of the boot id cannot be read.
pub fn boot_id() -> Result<String, ProcessError> {
    let path = "/proc/sys/kernel/random/boot_id";
    Ok(fs::read_to_string(path).map_err(io_error("read", path))?.trim().to_owned())
}

/// Returns the identity of the process that currently has this pid.
///
/// # Errors
/// [`ProcessError::Gone`] if no process has this pid, or /proc cannot be read.
pub fn identify_process(pid: u32) -> Result<Process, ProcessError> {
    let started = read_start_time(pid)?.ok_or(ProcessError::Gone { pid })?;
    Ok(Process { pid, started, cgroup: read_cgroup(pid)? })
}

/// Returns the identity of the process that opened a connection, from the credentials of its peer.
/// The pid is from the time of the connection, so it may have been reused. A process of another user
/// therefore does not count as the peer. Root may change its user after it has connected.
///
/// # Errors
/// [`ProcessError::Gone`] or [`ProcessError::OtherUser`], or /proc cannot be read.
pub fn identify_peer(pid: u32, peer: UserId) -> Result<Process, ProcessError> {
    let process = identify_process(pid)?;
    let user = read_effective_user(pid)?;
    // The user is read after the start time, so it belongs to this process or to a later one.
    if peer == UserId::ROOT || user == peer.get() {
        Ok(process)
    } else {
        Err(ProcessError::OtherUser { pid, user, peer })
    }
}

/// Returns the effective user of a process. The owner of /proc/PID is root for processes that are
/// not dumpable, so this function reads the field of the status.
fn read_effective_user(pid: u32) -> Result<u32, ProcessError> {
    let path = PathBuf::from(format!("/proc/{pid}/status"));
    let text = read_if_running(&path)?.ok_or(ProcessError::Gone { pid })?;
    let users = text.lines().find_map(|line| line.strip_prefix("Uid:"));
    let effective = users.and_then(|users| users.split_whitespace().nth(1)?.parse().ok());
    effective.ok_or(ProcessError::Unreadable { path, text })
}

/// Returns the name of the program that a process runs, at most 15 bytes, which the process can choose itself. Empty
/// if the process has ended.
pub fn program_name(pid: u32) -> String {
    fs::read(format!("/proc/{pid}/comm"))
        .map_or(String::new(), |name| String::from_utf8_lossy(&name).trim_end().to_owned())
}

/// Handle (pidfd) of a process, which never refers to a later process of the same pid.
#[derive(Debug)]
pub struct ProcessHandle(OwnedFd);

impl ProcessHandle {
    /// Opens a process. Returns `None` if the process has ended, even if its pid was reused.
    ///
    /// # Errors
    /// It cannot be determined whether the process runs.
    pub fn open(process: &Process) -> Result<Option<Self>, ProcessError> {
        let path = || format!("/proc/{}", process.pid);
        let pid = i32::try_from(process.pid).ok().and_then(Pid::from_raw);
        let pid = pid.ok_or(ProcessError::Gone { pid: process.pid })?;
        let handle = match pidfd_open(pid, PidfdFlags::NONBLOCK) {
            Err(Errno::SRCH) => return Ok(None),
            opened => Self(opened.map_err(|errno| io_error("open", path())(errno.into()))?),
        };
        // If the pid was reused, the handle refers to the wrong process. So compare the start times
        // after opening.
        let is_same = read_start_time(process.pid)? == Some(process.started);
        let is_running = !handle.has_ended().map_err(io_error("poll", path()))?;
        Ok((is_same && is_running).then_some(handle))
    }

    /// Returns whether the process has ended.
    ///
    /// # Errors
    /// The handle cannot be polled.
    pub fn has_ended(&self) -> io::Result<bool> {
        let mut fds = [PollFd::new(&self.0, PollFlags::IN)];
        Ok(poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))? > 0)
    }

    /// Kills the process. Succeeds if the process has already ended.
    ///
    /// # Errors
    /// The kernel rejects the signal.
    pub fn kill(&self) -> io::Result<()> {
        match pidfd_send_signal(&self.0, Signal::KILL) {
            Err(Errno::SRCH) => Ok(()), // the process has ended
            sent => Ok(sent?),
        }
    }
}

impl AsFd for ProcessHandle {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl From<ProcessHandle> for OwnedFd {
    fn from(handle: ProcessHandle) -> Self {
        handle.0
    }
}

/// Returns the start time of a process, in clock ticks since boot; `None` if it does not exist.
fn read_start_time(pid: u32) -> Result<Option<u64>, ProcessError> {
    let path = PathBuf::from(format!("/proc/{pid}/stat"));
    let Some(text) = read_if_running(&path)? else { return Ok(None) };
    // Field 22 is the start time (proc_pid_stat(5)); the name is field 2.
    let started = fields_after_name(&text).nth(19).and_then(|ticks| ticks.parse().ok());
    started.map(Some).ok_or(ProcessError::Unreadable { path, text })
}

/// Returns the contents of a file of a process in /proc, or `None` if the process has ended. Invalid UTF-8, which the
/// name of a process can contain, is replaced.
fn read_if_running(path: &Path) -> Result<Option<String>, ProcessError> {
    match fs::read(path) {
        Err(errno) if is_gone(&errno) => Ok(None),
        read => {
            let text = read.map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
            text.map(Some).map_err(io_error("read", path))
        }
    }
}

/// Returns the fields of /proc/PID/stat after the name. The name is in parentheses and may contain
/// spaces and parentheses.
fn fields_after_name(stat: &str) -> impl Iterator<Item = &str> {
    stat.rsplit_once(')').map_or("", |(_, rest)| rest).split_whitespace()
}

/// Returns whether a process or thread does not exist or is a zombie: it has ended, but its parent has
/// not waited for it. A zombie has neither memory nor descriptors.
fn is_zombie(pid: u32) -> bool {
    // The name of a thread may be invalid UTF-8.
    let stat = fs::read(format!("/proc/{pid}/stat"));
    stat.map_or(true, |stat| {
        matches!(fields_after_name(&String::from_utf8_lossy(&stat)).next(), Some("Z" | "X") | None)
    })
}

/// Returns the ID of a live thread of a process, usually the ID of the process itself. If its first thread
/// has ended before the others, the process looks like a zombie, but its memory still exists. `None` if no
/// thread is alive.
fn live_thread(pid: u32) -> Option<u32> {
    if !is_zombie(pid) {
        return Some(pid);
    }
    let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten();
    let mut threads = threads.filter_map(|thread| thread.ok()?.file_name().to_str()?.parse().ok());
    threads.find(|thread| !is_zombie(*thread))
}

/// Returns whether a process has a file open or mapped. Examines one thread: threads have the same memory
/// and, unless they were unshared, the same descriptors. If the thread ends meanwhile, another one is
/// examined.
fn process_uses_file(pid: u32, file: FileId) -> io::Result<bool> {
    for _ in 0..THREADS_EXAMINED_MAX {
        let Some(thread) = live_thread(pid) else { return Ok(false) };
        match uses_file(thread, file) {
            Ok(true) => return Ok(true),
            // The files of a thread that has ended are empty.
            _ if is_zombie(thread) => {}
            result => return result,
        }
    }
    Err(io::Error::other("its threads end too fast"))
}

fn read_cgroup(pid: u32) -> Result<String, ProcessError> {
    let path = format!("/proc/{pid}/cgroup");
    let text = fs::read_to_string(&path).map_err(io_error("read", &path))?;
    Ok(text.lines().find_map(|line| line.strip_prefix("0::")).unwrap_or_default().to_owned())
}

/// Returns whether an error means that the process has ended, or that the file was closed.
fn is_gone(errno: &io::Error) -> bool {
    errno.kind() == io::ErrorKind::NotFound || errno.raw_os_error() == Some(Errno::SRCH.raw_os_error())
}

/// Identity of a file, independent of its path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FileId {
    /// File in a file system.
    File {
        /// Device number of the file system.
        device: u64,
        /// Inode number of the file.
        inode: u64,
    },
    /// Character device, identified by its device number: containers and libvirt create their own
    /// device nodes for the same device.
    Device(u64),
}

impl FileId {
    /// Returns the identity of a file from its metadata.
    pub fn of(metadata: &fs::Metadata) -> Self {
        if metadata.file_type().is_char_device() {
            return Self::Device(metadata.rdev());
        }
        Self::File { device: metadata.dev(), inode: metadata.ino() }
    }

    /// Returns the identity of the file to which a descriptor refers.
    ///
    /// # Errors
    /// The descriptor cannot be duplicated, or the metadata cannot be read.
    pub fn of_descriptor(file: &OwnedFd) -> io::Result<Self> {
        Ok(Self::of(&File::from(file.try_clone()?).metadata()?))
    }
}

/// Result of the search for other processes that use a file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FileUsers {
    /// Identifiers of the processes that have the file open or mapped.
    pub pids: Vec<u32>,
    /// Identifiers of the running processes that could not be inspected.
    pub unreadable: Vec<u32>,
}

/// Finds all other processes that have a file open or mapped.
///
/// # Errors
/// /proc cannot be listed.
pub fn find_users(file: FileId) -> Result<FileUsers, ProcessError> {
    let mut users = FileUsers::default();
    for entry in fs::read_dir("/proc").map_err(io_error("list", "/proc"))? {
        let name = entry.map_err(io_error("list", "/proc"))?.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse().ok()) else { continue };
        if pid == std::process::id() {
            continue;
        }
        match process_uses_file(pid, file) {
            Ok(true) => users.pids.push(pid),
            Ok(false) => {}
            Err(_) => users.unreadable.push(pid),
        }
    }
    Ok(users)
}

/// Creates a memfd with a name and a size in bytes. The memfd cannot grow. [`find_memfd`] can find
/// it by its name.
///
/// # Errors
/// The memfd cannot be created or resized, for example because the limit of descriptors is reached.
pub fn make_memfd(name: &str, bytes: u64) -> io::Result<File> {
    let file = File::from(memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?);
    file.set_len(bytes)?;
    fcntl_add_seals(&file, MEMFD_SEALS)?;
    Ok(file)
}

/// Finds a memfd by its name among the files that processes have open or mapped, and opens it for
/// reading and writing. Only memfds that [`make_memfd`] created for the current user are found.
///
/// # Errors
/// /proc cannot be listed, or a memfd cannot be created.
pub fn find_memfd(name: &str) -> Result<Option<File>, ProcessError> {
    let device = memfd_device().map_err(io_error("create", "a memfd"))?;
    for entry in fs::read_dir("/proc").map_err(io_error("list", "/proc"))? {
        let process = entry.map_err(io_error("list", "/proc"))?;
        let is_process = process.file_name().to_str().is_some_and(|name| name.parse::<u32>().is_ok());
        let folders = ["fd", "map_files"].map(|folder| process.path().join(folder));
        let folders = folders.iter().filter(|_| is_process);
        if let Some(file) = folders.into_iter().find_map(|folder| find_memfd_in(folder, name, device)) {
            return Ok(Some(file));
        }
    }
    Ok(None)
}

/// Finds a memfd like [`find_memfd`], but only among the files that one process has open.
///
/// # Errors
/// A memfd cannot be created.
pub fn find_memfd_of(pid: u32, name: &str) -> Result<Option<File>, ProcessError> {
    let device = memfd_device().map_err(io_error("create", "a memfd"))?;
    Ok(find_memfd_in(Path::new(&format!("/proc/{pid}/fd")), name, device))
}

/// Finds a memfd by its name among the links of a directory, such as /proc/PID/fd. Returns `None`
/// if the directory cannot be read, for example because the process has ended.
fn find_memfd_in(folder: &Path, name: &str, device: u64) -> Option<File> {
    let link = format!("/memfd:{name} (deleted)");
    let links = fs::read_dir(folder).ok()?.filter_map(|entry| Some(entry.ok()?.path()));
    let mut named = links.filter(|path| fs::read_link(path).is_ok_and(|to| to.as_os_str() == &*link));
    named.find_map(|path| open_own_memfd(&path, device))
}

/// Returns the device number of the file system that contains all memfds. Users cannot create other
/// files in this file system.
fn memfd_device() -> io::Result<u64> {
    Ok(fstat(memfd_create("tarn-device", MemfdFlags::CLOEXEC)?)?.st_dev)
}

/// Opens the file of a link if it is a memfd that [`make_memfd`] created for the current user.
///
/// The target path of the link is not trusted: in a mount namespace, users can give any file such a
/// path. The file is examined through O_PATH first, because opening a device or a pipe has side
/// effects. Returns `None` also if the process has ended.
fn open_own_memfd(path: &Path, device: u64) -> Option<File> {
    let examined = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).ok()?;
    let stat = fstat(&examined).ok()?;
    let is_memfd = stat.st_dev == device
        && stat.st_nlink == 0
        && FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
    if !is_memfd || stat.st_uid != current_user().get() {
        return None;
    }
    let path = format!("/proc/self/fd/{}", examined.as_raw_fd());
    let file = OpenOptions::new().read(true).write(true).open(path).ok()?;
    fcntl_get_seals(&file).is_ok_and(|seals| seals.contains(MEMFD_SEALS)).then_some(file)
}

fn uses_file(pid: u32, file: FileId) -> io::Result<bool> {
    Ok(has_file_mapped(pid, file)? || has_file_open(pid, file)?)
}

fn has_file_mapped(pid: u32, file: FileId) -> io::Result<bool> {
    Ok(!mappings(pid, file)?.is_empty())
}

/// Returns the address ranges at which a process maps a file.
///
/// # Errors
/// The process has ended, or the caller may not inspect it.
pub fn mappings(pid: u32, file: FileId) -> io::Result<Vec<Range<usize>>> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps"))?;
    let mut ranges = Vec::new();
    for line in maps.lines() {
        if maps_file(pid, line, file)? {
            ranges.extend(parse_addresses(line));
        }
    }
    Ok(ranges)
}

/// Mappings of some files by a process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FileMappings {
    /// Address ranges of the mappings, in ascending order.
    pub addresses: Vec<Range<usize>>,
    /// Number of mappings that were omitted from `addresses` because of the limit.
    pub omitted: u64,
}

/// Returns the address ranges at which a process maps any of these files, except devices. Returns
/// only the `max` ranges with the lowest addresses, and the number of the remaining ranges. The
/// list of mappings may be very long, so it is read line by line.
///
/// # Errors
/// The process has ended, or the caller may not inspect it.
pub fn mappings_of(pid: u32, files: &BTreeSet<FileId>, max: usize) -> io::Result<FileMappings> {
    let maps = BufReader::new(File::open(format!("/proc/{pid}/maps"))?);
    let mut mappings = FileMappings::default();
    for line in maps.split(b'\n') {
        let line = line?;
        let line = String::from_utf8_lossy(&line); // only the path, which is not used, can be invalid UTF-8
        if !parse_mapped_file(&line).is_some_and(|file| files.contains(&file)) {
            continue;
        }
        if mappings.addresses.len() < max {
            mappings.addresses.extend(parse_addresses(&line));
        } else {
            mappings.omitted += 1;
        }
    }
    Ok(mappings)
}

/// Returns the file in a line of /proc/PID/maps.
fn parse_mapped_file(line: &str) -> Option<FileId> {
    let mut words = line.split_whitespace().skip(3);
    let (major, minor) = words.next()?.split_once(':')?;
    let number = |digits| u32::from_str_radix(digits, 16).ok();
    let device = rustix::fs::makedev(number(major)?, number(minor)?);
    Some(FileId::File { device, inode: words.next()?.parse().ok()? })
}

/// Returns whether a line of /proc/PID/maps (`addresses permissions offset device inode path`) maps
/// this file. For a device, the line contains the inode of one of several device nodes, so the
/// mapped file itself is examined.
fn maps_file(pid: u32, line: &str, file: FileId) -> io::Result<bool> {
    let mut words = line.split_whitespace();
    let [Some(addresses), Some(permissions), _, Some(on_device), Some(number)] =
        [(); 5].map(|()| words.next())
    else {
        return Ok(false);
    };
    match file {
        FileId::File { device, inode } => {
            let device = format!("{:02x}:{:02x}", rustix::fs::major(device), rustix::fs::minor(device));
            Ok(on_device == device && number == inode.to_string())
        }
        FileId::Device(_) if !permissions.ends_with('s') || number == "0" => Ok(false),
        FileId::Device(_) => refers_to_file(Path::new(&format!("/proc/{pid}/map_files/{addresses}")), file),
    }
}

/// Mapping in the address space of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// Address range of the mapping.
    pub addresses: Range<usize>,
    /// Whether the mapping is device memory. A shared mapping that cannot be examined counts as
    /// device memory.
    pub is_device: bool,
}

/// Returns all mappings of a process, in ascending order of addresses.
///
/// # Errors
/// The process has ended, or the caller may not inspect it.
pub fn all_mappings(pid: u32) -> io::Result<Vec<Mapping>> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps"))?;
    let mapping = |line: &str| {
        let is_device = is_shared_file(line) && maps_device(pid, line);
        Some(Mapping { addresses: parse_addresses(line)?, is_device })
    };
    Ok(maps.lines().filter_map(mapping).collect())
}

fn is_shared_file(line: &str) -> bool {
    let words: Vec<&str> = line.split_whitespace().take(5).collect();
    matches!(words[..], [_, permissions, _, _, inode] if permissions.ends_with('s') && inode != "0")
}

fn maps_device(pid: u32, line: &str) -> bool {
    let addresses = line.split_whitespace().next().unwrap_or_default();
    match fs::metadata(format!("/proc/{pid}/map_files/{addresses}")) {
        Ok(file) => file.file_type().is_char_device(),
        Err(errno) => !is_gone(&errno), // unmapped meanwhile
    }
}

/// Returns the address range in a line of /proc/PID/maps, such as
/// `7f0000000000-7f0040000000 rw-s ...`.
fn parse_addresses(line: &str) -> Option<Range<usize>> {
    let (start, end) = line.split_whitespace().next()?.split_once('-')?;
    Some(usize::from_str_radix(start, 16).ok()?..usize::from_str_radix(end, 16).ok()?)
}

fn has_file_open(pid: u32, file: FileId) -> io::Result<bool> {
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))? {
        if refers_to_file(&entry?.path(), file)? {
            return Ok(true);
        }
    }
    Ok(false)
}

fn refers_to_file(descriptor: &Path, file: FileId) -> io::Result<bool> {
    match fs::metadata(descriptor) {
        Err(errno) if is_gone(&errno) => Ok(false), // closed meanwhile
        metadata => Ok(FileId::of(&metadata?) == file),
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::{BufRead as _, BufReader, Read as _, Write as _},
        os::unix::fs::PermissionsExt as _,
        process::{Child, Command, Stdio},
    };

    use super::*;
    use crate::skipped::report_skipped;

    /// Starts a process that runs until its standard input is closed.
    fn idle_process() -> Child {
        Command::new("cat").stdin(Stdio::piped()).spawn().unwrap()
    }

    fn end(mut child: Child) {
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn process_of_another_user_is_not_the_peer() {
        let child = idle_process();
        let user = rustix::process::geteuid().as_raw();
        let other = UserId::new(user + 1).unwrap();
        let identify = |peer| identify_peer(child.id(), peer);
        assert_eq!(identify(UserId::new(user).unwrap()).unwrap(), identify_process(child.id()).unwrap());
        assert!(identify(UserId::ROOT).is_ok(), "root may change its user");
        let expected = format!(
            "process {} belongs to user {user}, but user {other} opened this connection: connect again",
            child.id()
        );
        assert_eq!(identify(other).unwrap_err().to_string(), expected);
        let pid = child.id();
        end(child);
        assert!(matches!(identify_peer(pid, UserId::ROOT), Err(ProcessError::Gone { .. })));
    }

    #[test]
    fn process_whose_name_is_not_utf8_is_identified() {
        use std::os::unix::ffi::OsStrExt as _;
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join(std::ffi::OsStr::from_bytes(b"a) \xff\xd0"));
        std::os::unix::fs::symlink("/bin/cat", &program).unwrap();
        let mut child = Command::new(&program).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        // The kernel sets the name after it has ended `spawn`, and before the program runs.
        child.stdin.as_mut().unwrap().write_all(b"x").unwrap();
        child.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
        assert_eq!(fs::read(format!("/proc/{}/comm", child.id())).unwrap(), b"a) \xff\xd0\n");
        let user = UserId::new(rustix::process::geteuid().as_raw()).unwrap();
        let process = identify_peer(child.id(), user).unwrap();
        assert!(ProcessHandle::open(&process).unwrap().is_some());
        crate::host::process_memory::used_memory(child.id()).unwrap();
        end(child);
    }

    #[test]
    fn reused_pid_is_detected() {
        let child = idle_process();
        let process = identify_process(child.id()).unwrap();
        let later = Process { started: process.started + 1, ..process.clone() };
        assert!(ProcessHandle::open(&process).unwrap().is_some());
        assert!(ProcessHandle::open(&later).unwrap().is_none());
        end(child);
        assert!(ProcessHandle::open(&process).unwrap().is_none());
        assert!(matches!(identify_process(process.pid), Err(ProcessError::Gone { .. })));
    }

    #[test]
    fn zombie_process_counts_as_ended() {
        let mut child = idle_process();
        let process = identify_process(child.id()).unwrap();
        let handle = ProcessHandle::open(&process).unwrap().unwrap();
        assert!(!handle.has_ended().unwrap());
        handle.kill().unwrap();
        let mut fds = [PollFd::new(&handle, PollFlags::IN)];
        poll(&mut fds, None).unwrap();
        assert!(ProcessHandle::open(&process).unwrap().is_none());
        child.wait().unwrap();
    }

    /// Uses a private mapping of /dev/zero as device memory, because the kernel shows a shared
    /// mapping of /dev/zero as a file in memory.
    #[test]
    fn device_mappings_differ_from_file_mappings() {
        use vm_memory::{FileOffset, MmapRegion, mmap::MmapRegionBuilder};
        let map = |file: File, flags| -> MmapRegion<()> {
            let builder = MmapRegionBuilder::new(1 << 20).with_mmap_prot(libc::PROT_READ);
            builder.with_mmap_flags(flags).with_file_offset(FileOffset::new(file, 0)).build().unwrap()
        };
        let zero = map(File::open("/dev/zero").unwrap(), libc::MAP_PRIVATE);
        let file = map(make_memfd("tarn-test", 1 << 20).unwrap(), libc::MAP_SHARED);
        let pid = std::process::id();
        let addresses = |region: &MmapRegion<()>| {
            let start = region.as_ptr() as usize;
            format!("{start:x}-{:x} rw-s", start + region.size())
        };
        assert_eq!((maps_device(pid, &addresses(&zero)), maps_device(pid, &addresses(&file))), (true, false));
        let mappings = all_mappings(pid).unwrap();
        assert!(mappings.is_sorted_by_key(|mapping| mapping.addresses.start));
        assert!(!mappings.iter().any(|mapping| mapping.is_device));
        assert!(is_shared_file("7f00-7f01 rw-s 00000000 00:05 123 /dev/dax0.1"));
        assert!(!is_shared_file("7f00-7f01 rw-p 00000000 00:05 123 /dev/zero"));
        assert!(!is_shared_file("7f00-7f01 rw-s 00000000 00:00 0"));
    }

    /// Script of an attack: in a mount namespace, it gives another user's file ($1) the path of a
    /// memfd ($2), and opens the file.
    const RENAME_IN_NAMESPACE_SCRIPT: &str = r#"
        mount -t tmpfs none /mnt && cd /mnt && mkdir old && : > "$2" && mount --bind "$1" "$2" || exit 1
        pivot_root . old && exec 9< "/$2" && echo ready && read line"#;

    #[test]
    fn file_renamed_in_mount_namespace_is_not_a_memfd() {
        if !rustix::process::geteuid().is_root() {
            return report_skipped(
                "a file with the path of a memfd in a mount namespace, which requires root",
            );
        }
        let victim = tempfile::Builder::new().prefix("tarn-victim-").tempfile_in("/var/tmp").unwrap();
        fs::set_permissions(victim.path(), fs::Permissions::from_mode(0o644)).unwrap();
        let (name, link) = ("tarn-slice-7.2", "memfd:tarn-slice-7.2 (deleted)");
        let mut attacker = Command::new("setpriv");
        attacker.args(["--reuid=65534", "--regid=65534", "--clear-groups"]);
        attacker.args(["unshare", "--user", "--map-root-user", "--mount"]);
        attacker.args(["sh", "-c", RENAME_IN_NAMESPACE_SCRIPT, "sh"]).arg(victim.path()).arg(link);
        let mut attacker = attacker.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(attacker.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n", "the script failed: it requires user namespaces");
        let link_target = fs::read_link(format!("/proc/{}/fd/9", attacker.id())).unwrap();
        assert_eq!(link_target.as_os_str(), &*format!("/{link}"), "the link does not look like a memfd");
        let file = find_memfd(name).unwrap();
        end(attacker);
        assert!(file.is_none(), "opened the file of another user: {file:?}");
    }

    #[test]
    fn memfd_is_found_by_name_and_cannot_grow() {
        let file = make_memfd("tarn-slice-8.1", 4096).unwrap();
        let unsealed = File::from(memfd_create("tarn-slice-8.2", MemfdFlags::CLOEXEC).unwrap());
        let found = find_memfd("tarn-slice-8.1").unwrap().unwrap();
        assert_eq!(FileId::of(&found.metadata().unwrap()), FileId::of(&file.metadata().unwrap()));
        assert_eq!(found.set_len(8192).unwrap_err().raw_os_error(), Some(Errno::PERM.raw_os_error()));
        found.set_len(0).unwrap();
        assert!(
            find_memfd("tarn-slice-8.2").unwrap().is_none(),
            "{unsealed:?} does not have the required seals"
        );
        assert!(find_memfd("tarn-slice-8.3").unwrap().is_none());
    }

    #[test]
    fn device_opened_through_another_node_is_in_use() {
        if !rustix::process::geteuid().is_root() {
            return report_skipped("a device in use through another node, which requires root");
        }
        let dir = tempfile::tempdir().unwrap();
        let node = dir.path().join("full");
        let made = Command::new("mknod").arg(&node).args(["c", "1", "7"]).status().unwrap();
        assert!(made.success());
        let id = FileId::of(&fs::metadata("/dev/full").unwrap());
        let is_user = |pid| find_users(id).unwrap().pids.contains(&pid);
        let stdout = OpenOptions::new().write(true).open(&node).unwrap();
        let child = Command::new("cat").stdin(Stdio::piped()).stdout(stdout).spawn().unwrap();
        assert!(is_user(child.id()));
        let pid = child.id();
        end(child);
        assert!(!is_user(pid));
    }

    #[test]
    fn processes_of_other_users_are_reported_as_unreadable() {
        if !rustix::process::geteuid().is_root() {
            return report_skipped("a search for users of a file by another user, which requires root");
        }
        let child = idle_process();
        let file = tempfile::NamedTempFile::new().unwrap();
        let id = FileId::of(&file.as_file().metadata().unwrap());
        let as_nobody = std::thread::spawn(move || {
            let nobody = rustix::process::Uid::from_raw(65534);
            rustix::thread::set_thread_res_uid(None, nobody, None).unwrap(); // changes only this thread
            find_users(id).unwrap()
        });
        let users = as_nobody.join().unwrap();
        let pid = child.id();
        end(child);
        assert_eq!(users.pids, Vec::<u32>::new());
        assert!(users.unreadable.contains(&pid), "{users:?} lacks {pid}");
    }

    #[test]
    fn process_with_open_file_is_found() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let id = FileId::of(&file.as_file().metadata().unwrap());
        assert_eq!(find_users(id).unwrap().pids, Vec::<u32>::new());
        let child = Command::new("cat").stdin(Stdio::piped()).stdout(file.reopen().unwrap()).spawn().unwrap();
        assert_eq!(find_users(id).unwrap().pids, [child.id()]);
        end(child);
        assert_eq!(find_users(id).unwrap().pids, Vec::<u32>::new());
    }
}
