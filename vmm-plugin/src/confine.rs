//! Drops the privileges of this process before the guest runs, as a guest may escape into it. A
//! process started as root becomes another user with an empty read-only root directory, unless
//! started with `--unconfined`. All files are open by then, and no other thread exists yet:
//! capabilities, user IDs and no_new_privs are per thread. [`threads`] filters system calls.

pub mod root;
pub mod sigsys;
pub mod syscall_rules;
pub mod threads;

use std::{io, os::fd::OwnedFd, path::PathBuf};

use rustix::{
    io::Errno,
    process::{Gid, Resource, Rlimit, Uid, geteuid},
    thread::{
        CapabilitySet, CapabilitySets, capabilities, clear_ambient_capability_set,
        remove_capability_from_bounding_set, set_capabilities, set_no_new_privs, set_thread_groups,
        set_thread_res_gid, set_thread_res_uid,
    },
};

/// Options of the confinement.
#[derive(Clone, Debug, clap::Args)]
pub struct Confinement {
    /// User ID to switch to before the guest runs; requires --gid. Required when started as root
    #[arg(long, value_name = "NUMBER", requires = "gid", value_parser = unprivileged_id())]
    uid: Option<u32>,
    /// Group ID to switch to; supplementary groups are dropped. Requires --uid
    #[arg(long, value_name = "NUMBER", requires = "uid", value_parser = unprivileged_id())]
    gid: Option<u32>,
    /// Root directory to switch to; must be empty [default as root: an empty read-only file system]
    #[arg(long, value_name = "DIR")]
    chroot: Option<PathBuf>,
    /// When started as root, stay root and keep access to all files. Capabilities are dropped and
    /// system calls filtered nevertheless
    #[arg(long, conflicts_with_all = ["uid", "gid", "chroot"])]
    unconfined: bool,
    /// Action on a system call that the thread's filter does not allow: true ends the process, log
    /// allows and logs it, false allows it
    #[arg(long, value_enum, hide_possible_values = true, default_value_t, value_name = "true|false|log")]
    pub seccomp: Seccomp,
}

/// Parses a user or group ID other than root's and the reserved ID -1.
fn unprivileged_id() -> clap::builder::RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(1..i64::from(u32::MAX))
}

/// Action on a system call that the thread's filter does not allow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Seccomp {
    /// End the process.
    #[default]
    True,
    /// Allow it.
    False,
    /// Allow it and write to the kernel's audit log.
    Log,
}

/// Error returned when the process cannot be confined.
#[derive(Debug, thiserror::Error)]
pub enum ConfineError {
    /// Started as root without a user to switch to.
    #[error(
        "uid: missing: as root, --uid NUMBER and --gid NUMBER must name an unprivileged user, or --unconfined must be given"
    )]
    MissingUser,
    /// A system call failed.
    #[error("{option}: cannot {doing}{hint}")]
    System {
        /// Option that caused the call.
        option: &'static str,
        /// The failed operation, completing "cannot …".
        doing: String,
        /// Advice appended to the message; may be empty.
        hint: &'static str,
        /// The underlying error.
        #[source]
        errno: io::Error,
    },
    /// The root directory must be empty: an escaped guest could reach its files.
    #[error("chroot: {} is not empty", .0.display())]
    NotEmpty(PathBuf),
}

fn error<E: Into<io::Error>>(
    option: &'static str,
    doing: impl Into<String>,
) -> impl FnOnce(E) -> ConfineError {
    move |error| {
        let (doing, errno) = (doing.into(), error.into());
        let hint = match errno.raw_os_error().map(Errno::from_raw_os_error) {
            Some(Errno::PERM) => "; needs root with CAP_SYS_ADMIN",
            _ => "",
        };
        ConfineError::System { option, doing, hint, errno }
    }
}

/// Raises the limit of open files to its maximum: each slice is one descriptor.
///
/// # Errors
/// The error of getrlimit(2) or setrlimit(2).
pub fn raise_file_limit() -> io::Result<()> {
    let Rlimit { maximum, .. } = rustix::process::getrlimit(Resource::Nofile);
    Ok(rustix::process::setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })?)
}

impl Confinement {
    /// Checks everything that [`PreparedConfinement::enter`] needs, and changes nothing.
    ///
    /// # Errors
    /// [`ConfineError::MissingUser`] if the process would stay root, or another variant if a check
    /// fails.
    pub fn prepare(self) -> Result<PreparedConfinement, ConfineError> {
        let is_root = geteuid().is_root();
        if is_root && self.uid.is_none() && !self.unconfined {
            return Err(ConfineError::MissingUser);
        }
        let root = match &self.chroot {
            Some(path) => Some(root::open_empty(path)?),
            None if is_root && !self.unconfined => Some(root::make_empty()?),
            None => None,
        };
        if let Some(Root { display_name, .. }) = &root {
            require_capabilities(CapabilitySet::SYS_CHROOT)
                .map_err(error("chroot", format!("use {display_name} as the root directory")))?;
        }
        let user = self.uid.zip(self.gid);
        if let Some((uid, gid)) = user {
            require_capabilities(CapabilitySet::SETUID | CapabilitySet::SETGID)
                .map_err(user_error(uid, gid))?;
        }
        Ok(PreparedConfinement { user, root, seccomp: self.seccomp })
    }
}

fn user_error(uid: u32, gid: u32) -> impl FnOnce(Errno) -> ConfineError {
    error("uid", format!("switch to user {uid} and group {gid}"))
}

/// Returns EPERM, as the kernel would, if capabilities are missing.
fn require_capabilities(needed: CapabilitySet) -> Result<(), Errno> {
    if capabilities(None)?.effective.contains(needed) { Ok(()) } else { Err(Errno::PERM) }
}

/// The future root directory.
#[derive(Debug)]
struct Root {
    directory: OwnedFd,
    /// Its name in messages.
    display_name: String,
}

/// A checked confinement.
#[derive(Debug)]
pub struct PreparedConfinement {
    user: Option<(u32, u32)>,
    root: Option<Root>,
    /// How system calls are filtered.
    pub seccomp: Seccomp,
}

impl PreparedConfinement {
    /// Drops all privileges irrevocably. This process must have no other thread yet.
    ///
    /// # Errors
    /// [`ConfineError`]; the guest must not run then.
    pub fn enter(self) -> Result<(), ConfineError> {
        set_no_new_privs(true).map_err(error("capabilities", "set no_new_privs"))?;
        if let Some(root) = self.root {
            root::enter(&root)
                .map_err(error("chroot", format!("use {} as the root directory", root.display_name)))?;
        }
        empty_bounding_set().map_err(error("capabilities", "clear the bounding set"))?;
        if let Some((uid, gid)) = self.user {
            become_user(uid, gid).map_err(user_error(uid, gid))?;
        }
        drop_capabilities().map_err(error("capabilities", "drop all"))
    }
}

/// Clears the capability bounding set. EPERM is ignored: with no_new_privs the set grants nothing.
fn empty_bounding_set() -> Result<(), Errno> {
    for number in 0..u64::BITS {
        match remove_capability_from_bounding_set(CapabilitySet::from_bits_retain(1 << number)) {
            Err(Errno::INVAL) => return Ok(()), // past the last capability of this kernel
            Err(Errno::PERM) => return Ok(()),
            other => other?,
        }
    }
    Ok(())
}

fn become_user(uid: u32, gid: u32) -> Result<(), Errno> {
    let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
    set_thread_groups(&[])?;
    set_thread_res_gid(gid, gid, gid)?;
    set_thread_res_uid(uid, uid, uid)
}

fn drop_capabilities() -> Result<(), Errno> {
    let none = CapabilitySet::empty();
    clear_ambient_capability_set()?;
    set_capabilities(None, CapabilitySets { effective: none, permitted: none, inheritable: none })
}
