//! Processes of this machine: which one is which, whether it lives, when it ends, and what memory it has. A process is
//! known by its pid, its start and the machine's boot; pids alone come round again.

use std::{
    fs::{self, File, OpenOptions},
    io,
    ops::Range,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::fs::MetadataExt,
    },
    path::{Path, PathBuf},
};

use pool::agent::Process;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
};

/// What could not be learned about a process.
#[derive(Debug, thiserror::Error)]
pub enum ProcessError {
    /// The operating system refused.
    #[error("{doing} {}", path.display())]
    Io {
        /// What was tried.
        doing: &'static str,
        /// With what.
        path: PathBuf,
        /// Why not.
        #[source]
        errno: io::Error,
    },
    /// The kernel said something unexpected.
    #[error("{} holds {text:?}", path.display())]
    Unreadable {
        /// Where.
        path: PathBuf,
        /// What it said.
        text: String,
    },
    /// It is gone.
    #[error("process {pid} is gone")]
    Gone {
        /// Which one.
        pid: u32,
    },
}

fn io_error(doing: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> ProcessError {
    let path = path.into();
    move |errno| ProcessError::Io { doing, path, errno }
}

/// Changes when the machine restarts.
///
/// # Errors
/// The kernel does not say.
pub fn boot_id() -> Result<String, ProcessError> {
    let path = "/proc/sys/kernel/random/boot_id";
    Ok(fs::read_to_string(path).map_err(io_error("read", path))?.trim().to_owned())
}

/// Who has this pid now.
///
/// # Errors
/// [`ProcessError::Gone`], or the kernel does not say.
pub fn identify(pid: u32) -> Result<Process, ProcessError> {
    let started = started(pid)?.ok_or(ProcessError::Gone { pid })?;
    Ok(Process { pid, started, cgroup: cgroup(pid)? })
}

/// A process that cannot be mistaken for another, whoever gets its pid.
#[derive(Debug)]
pub struct Watched(OwnedFd);

impl Watched {
    /// Exactly this process, or `None` if it is gone, whoever has its pid now.
    ///
    /// # Errors
    /// The kernel does not say, so nobody knows.
    pub fn open(process: &Process) -> Result<Option<Self>, ProcessError> {
        let path = || format!("/proc/{}", process.pid);
        let pid = i32::try_from(process.pid).ok().and_then(Pid::from_raw);
        let pid = pid.ok_or(ProcessError::Gone { pid: process.pid })?;
        let watched = match pidfd_open(pid, PidfdFlags::NONBLOCK) {
            Err(Errno::SRCH) => return Ok(None),
            opened => Self(opened.map_err(|errno| io_error("watch", path())(errno.into()))?),
        };
        // The descriptor stays with whoever had the pid when it was opened: so look at the start only now.
        let same = started(process.pid)? == Some(process.started);
        let lives = !watched.has_ended().map_err(io_error("watch", path()))?;
        Ok((same && lives).then_some(watched))
    }

    /// Whether it is gone.
    ///
    /// # Errors
    /// The kernel does not say.
    pub fn has_ended(&self) -> io::Result<bool> {
        let mut fds = [PollFd::new(&self.0, PollFlags::IN)];
        Ok(poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))? > 0)
    }

    /// Ends it.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn kill(&self) -> io::Result<()> {
        match pidfd_send_signal(&self.0, Signal::KILL) {
            Err(Errno::SRCH) => Ok(()), // gone already
            sent => Ok(sent?),
        }
    }
}

impl AsFd for Watched {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl From<Watched> for OwnedFd {
    fn from(watched: Watched) -> Self {
        watched.0
    }
}

/// When a process started, in clock ticks since the machine did; `None` if there is none.
fn started(pid: u32) -> Result<Option<u64>, ProcessError> {
    let path = PathBuf::from(format!("/proc/{pid}/stat"));
    let text = match fs::read_to_string(&path) {
        Err(errno) if is_gone(&errno) => return Ok(None),
        read => read.map_err(io_error("read", &path))?,
    };
    // After the name come state, parent, ..., and the 20th is the start.
    let started = after_name(&text).nth(19).and_then(|ticks| ticks.parse().ok());
    started.map(Some).ok_or(ProcessError::Unreadable { path, text })
}

/// The words of a stat file after the name, which stands in parentheses and may hold anything.
fn after_name(stat: &str) -> impl Iterator<Item = &str> {
    stat.rsplit_once(')').map_or("", |(_, rest)| rest).split_whitespace()
}

/// Whether it has ended and only waits for its parent to take notice. It has no memory and no descriptors.
fn is_zombie(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"));
    stat.map_or(true, |stat| matches!(after_name(&stat).next(), Some("Z" | "X") | None))
}

fn cgroup(pid: u32) -> Result<String, ProcessError> {
    let path = format!("/proc/{pid}/cgroup");
    let text = fs::read_to_string(&path).map_err(io_error("read", &path))?;
    Ok(text.lines().find_map(|line| line.strip_prefix("0::")).unwrap_or_default().to_owned())
}

/// A process that ends while it is looked at.
fn is_gone(errno: &io::Error) -> bool {
    errno.kind() == io::ErrorKind::NotFound || errno.raw_os_error() == Some(Errno::SRCH.raw_os_error())
}

/// Which file, whatever it is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileId {
    device: u64,
    inode: u64,
}

impl FileId {
    /// Of a file's metadata.
    pub fn of(metadata: &fs::Metadata) -> Self {
        Self { device: metadata.dev(), inode: metadata.ino() }
    }
}

/// Who else has a file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Users {
    /// Processes that have it open or mapped.
    pub pids: Vec<u32>,
    /// How many processes could not be looked into.
    pub unseen: usize,
}

/// Every other process that has this file open or mapped.
///
/// # Errors
/// The kernel does not say which processes there are.
pub fn users_of(file: FileId) -> Result<Users, ProcessError> {
    let mut users = Users::default();
    for entry in fs::read_dir("/proc").map_err(io_error("list", "/proc"))? {
        let name = entry.map_err(io_error("list", "/proc"))?.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse().ok()) else { continue };
        if pid == std::process::id() {
            continue;
        }
        match has(pid, file) {
            Ok(true) => users.pids.push(pid),
            Ok(false) => {}
            Err(errno) if is_gone(&errno) => {}
            Err(_) => users.unseen += usize::from(!is_zombie(pid)),
        }
    }
    Ok(users)
}

/// A file in memory of this name that is this user's own, of whoever has it open or mapped, for reading and writing. Anybody may make
/// one of the same name, but not give it to us.
///
/// # Errors
/// The kernel does not say which processes there are.
pub fn find_memfd(name: &str) -> Result<Option<File>, ProcessError> {
    let link = format!("/memfd:{name} (deleted)");
    for entry in fs::read_dir("/proc").map_err(io_error("list", "/proc"))? {
        let process = entry.map_err(io_error("list", "/proc"))?;
        let is_process = process.file_name().to_str().is_some_and(|name| name.parse::<u32>().is_ok());
        let links = ["fd", "map_files"].map(|folder| fs::read_dir(process.path().join(folder)));
        let links = links.into_iter().filter(|_| is_process).flatten().flatten();
        let mut named = links
            .filter_map(|entry| Some(entry.ok()?.path()))
            .filter(|path| fs::read_link(path).is_ok_and(|to| to.as_os_str() == &*link));
        if let Some(file) = named.find_map(|path| open_own(&path)) {
            return Ok(Some(file));
        }
    }
    Ok(None)
}

/// A process that ended meanwhile had it no more.
fn open_own(path: &Path) -> Option<File> {
    let file = OpenOptions::new().read(true).write(true).open(path).ok()?;
    (file.metadata().ok()?.uid() == rustix::process::geteuid().as_raw()).then_some(file)
}

fn has(pid: u32, file: FileId) -> io::Result<bool> {
    Ok(has_mapped(pid, file)? || has_open(pid, file)?)
}

fn has_mapped(pid: u32, file: FileId) -> io::Result<bool> {
    Ok(!mappings(pid, file)?.is_empty())
}

/// Where a process has this file mapped.
///
/// # Errors
/// It is gone, or is not ours to look into.
pub fn mappings(pid: u32, file: FileId) -> io::Result<Vec<Range<usize>>> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps"))?;
    let device = format!("{:02x}:{:02x}", rustix::fs::major(file.device), rustix::fs::minor(file.device));
    let inode = file.inode.to_string();
    // address perms offset device inode path
    let is_it = |line: &&str| {
        let mut words = line.split_whitespace().skip(3);
        words.next() == Some(&device) && words.next() == Some(&inode)
    };
    Ok(maps.lines().filter(is_it).filter_map(addresses).collect())
}

/// As in `7f0000000000-7f0040000000 rw-s ...`.
fn addresses(line: &str) -> Option<Range<usize>> {
    let (start, end) = line.split_whitespace().next()?.split_once('-')?;
    Some(usize::from_str_radix(start, 16).ok()?..usize::from_str_radix(end, 16).ok()?)
}

fn has_open(pid: u32, file: FileId) -> io::Result<bool> {
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))? {
        if is_file(&entry?.path(), file)? {
            return Ok(true);
        }
    }
    Ok(false)
}

fn is_file(descriptor: &Path, file: FileId) -> io::Result<bool> {
    match fs::metadata(descriptor) {
        Err(errno) if is_gone(&errno) => Ok(false), // closed meanwhile
        seen => Ok(FileId::of(&seen?) == file),
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command, Stdio};

    use super::*;

    /// Ends at the latest when it is dropped, with its input.
    fn sleeper() -> Child {
        Command::new("cat").stdin(Stdio::piped()).spawn().unwrap()
    }

    fn end(mut child: Child) {
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn a_process_is_told_from_a_later_one_with_its_pid() {
        let child = sleeper();
        let process = identify(child.id()).unwrap();
        let later = Process { started: process.started + 1, ..process.clone() };
        assert!(Watched::open(&process).unwrap().is_some());
        assert!(Watched::open(&later).unwrap().is_none());
        end(child);
        assert!(Watched::open(&process).unwrap().is_none());
        assert!(matches!(identify(process.pid), Err(ProcessError::Gone { .. })));
    }

    #[test]
    fn a_process_that_nobody_has_waited_for_is_gone_all_the_same() {
        let mut child = sleeper();
        let process = identify(child.id()).unwrap();
        let watched = Watched::open(&process).unwrap().unwrap();
        assert!(!watched.has_ended().unwrap());
        watched.kill().unwrap();
        let mut fds = [PollFd::new(&watched, PollFlags::IN)];
        poll(&mut fds, None).unwrap();
        assert!(Watched::open(&process).unwrap().is_none());
        child.wait().unwrap();
    }

    #[test]
    fn whoever_has_a_file_open_is_found() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let id = FileId::of(&file.as_file().metadata().unwrap());
        assert_eq!(users_of(id).unwrap().pids, Vec::<u32>::new());
        let child = Command::new("cat").stdin(Stdio::piped()).stdout(file.reopen().unwrap()).spawn().unwrap();
        assert_eq!(users_of(id).unwrap().pids, [child.id()]);
        end(child);
        assert_eq!(users_of(id).unwrap().pids, Vec::<u32>::new());
    }
}
