//! Drops the privileges of this process before the guest runs, because a guest may escape into the
//! process. A process started as root switches to another user and an empty read-only root
//! directory, unless started with `--unconfined`. All files must be open before the privileges are
//! dropped. No other thread may exist, because capabilities, user IDs and no_new_privs are per
//! thread. [`threads`] filters system calls.

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

/// Command-line options that define the privileges of the VMM.
#[derive(Clone, Debug, clap::Args)]
pub struct Confinement {
    /// User ID to switch to before the guest runs; requires --gid. Required when started as root
    #[arg(long, value_name = "NUMBER", requires = "gid", value_parser = unprivileged_id_parser())]
    uid: Option<u32>,
    /// Group ID to switch to before the guest runs; supplementary groups are dropped. Requires
    /// --uid
    #[arg(long, value_name = "NUMBER", requires = "uid", value_parser = unprivileged_id_parser())]
    gid: Option<u32>,
    /// Root directory to switch to; must be empty [default as root: an empty read-only file system]
    #[arg(long, value_name = "DIR")]
    chroot: Option<PathBuf>,
    /// When started as root, stay root and keep access to all files. Capabilities are still
    /// dropped, and system calls are still filtered
    #[arg(long, conflicts_with_all = ["uid", "gid", "chroot"])]
    unconfined: bool,
    /// Action on a system call that is not on the thread's allow list: true ends the process, log
    /// allows and logs the call, false disables the filters
    #[arg(long, value_enum, hide_possible_values = true, default_value_t, value_name = "true|false|log")]
    pub seccomp: SeccompMode,
}

/// Returns a parser for the ID of an unprivileged user or group, which excludes 0 (root) and the
/// reserved value -1.
fn unprivileged_id_parser() -> clap::builder::RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(1..i64::from(u32::MAX))
}

/// Action on a system call that is not on the allow list of its thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum SeccompMode {
    /// End the process.
    #[default]
    True,
    /// Allow the call: no filters are installed.
    False,
    /// Allow the call and log it in the kernel's audit log.
    Log,
}

/// Error returned when the process cannot be confined.
#[derive(Debug, thiserror::Error)]
pub enum ConfineError {
    /// The process was started as root, but the options do not name a user to switch to.
    #[error(
        "--uid: missing: as root, --uid NUMBER and --gid NUMBER must name an unprivileged user, or --unconfined must be given"
    )]
    MissingUser,
    /// A system call failed.
    #[error("{option}: cannot {operation}{hint}")]
    System {
        /// Name of the option that requires the system call.
        option: &'static str,
        /// Failed operation, completing "cannot …".
        operation: String,
        /// Advice that is appended to the message, or an empty string.
        hint: &'static str,
        /// Error returned by the system call.
        #[source]
        errno: io::Error,
    },
    /// The given root directory is not empty: an escaped guest could access the files in it.
    #[error("--chroot: {} is not empty", .0.display())]
    NotEmpty(PathBuf),
}

fn system_error<E: Into<io::Error>>(
    option: &'static str,
    operation: impl Into<String>,
) -> impl FnOnce(E) -> ConfineError {
    move |error| {
        let (operation, errno) = (operation.into(), error.into());
        let hint = match errno.raw_os_error().map(Errno::from_raw_os_error) {
            Some(Errno::PERM) => "; needs root with CAP_SYS_ADMIN",
            _ => "",
        };
        ConfineError::System { option, operation, hint, errno }
    }
}

/// Raises the soft limit on open files to the hard limit, because each slice needs a file
/// descriptor.
///
/// # Errors
/// The error returned by setrlimit(2).
pub fn raise_file_limit() -> io::Result<()> {
    let Rlimit { maximum, .. } = rustix::process::getrlimit(Resource::Nofile);
    Ok(rustix::process::setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })?)
}

impl Confinement {
    /// Checks that the process can enter the confinement, and opens the future root directory. Does
    /// not drop privileges.
    ///
    /// # Errors
    /// [`ConfineError::MissingUser`] if the process would stay root, and [`ConfineError`] if a
    /// check fails.
    pub fn prepare(self) -> Result<PreparedConfinement, ConfineError> {
        let is_root = geteuid().is_root();
        if is_root && self.uid.is_none() && !self.unconfined {
            return Err(ConfineError::MissingUser);
        }
        let root = match &self.chroot {
            Some(path) => Some(root::open_empty_root(path)?),
            None if is_root && !self.unconfined => Some(root::create_empty_root()?),
            None => None,
        };
        if let Some(Root { display_name, .. }) = &root {
            require_capabilities(CapabilitySet::SYS_CHROOT)
                .map_err(system_error("--chroot", format!("use {display_name} as the root directory")))?;
        }
        let user = self.uid.zip(self.gid);
        if let Some((uid, gid)) = user {
            require_capabilities(CapabilitySet::SETUID | CapabilitySet::SETGID)
                .map_err(switch_user_error(uid, gid))?;
        }
        Ok(PreparedConfinement { user, root, seccomp: self.seccomp })
    }
}

fn switch_user_error(uid: u32, gid: u32) -> impl FnOnce(Errno) -> ConfineError {
    system_error("--uid", format!("switch to user {uid} and group {gid}"))
}

/// Returns EPERM if the process lacks the needed capabilities, like a system call that needs them.
fn require_capabilities(needed: CapabilitySet) -> Result<(), Errno> {
    if capabilities(None)?.effective.contains(needed) { Ok(()) } else { Err(Errno::PERM) }
}

/// Directory that becomes the root directory of the process.
#[derive(Debug)]
struct Root {
    directory: OwnedFd,
    /// Name of the directory in messages.
    display_name: String,
}

/// Confinement that the process can enter, as returned by [`Confinement::prepare`].
#[derive(Debug)]
pub struct PreparedConfinement {
    user: Option<(u32, u32)>,
    root: Option<Root>,
    /// Action on system calls that are not on the allow list.
    pub seccomp: SeccompMode,
}

impl PreparedConfinement {
    /// Drops all privileges irrevocably. Must be called while the process has only one thread.
    ///
    /// # Errors
    /// [`ConfineError`] if a system call fails. The guest must then not run.
    pub fn enter(self) -> Result<(), ConfineError> {
        set_no_new_privs(true).map_err(system_error("capabilities", "set no_new_privs"))?;
        if let Some(root) = self.root {
            root::enter(&root).map_err(system_error(
                "--chroot",
                format!("use {} as the root directory", root.display_name),
            ))?;
        }
        clear_bounding_set().map_err(system_error("capabilities", "clear the bounding set"))?;
        if let Some((uid, gid)) = self.user {
            switch_user(uid, gid).map_err(switch_user_error(uid, gid))?;
        }
        drop_capabilities().map_err(system_error("capabilities", "drop all"))
    }
}

/// Clears the capability bounding set. EPERM is ignored, because with no_new_privs the bounding set
/// cannot grant capabilities.
fn clear_bounding_set() -> Result<(), Errno> {
    for number in 0..u64::BITS {
        match remove_capability_from_bounding_set(CapabilitySet::from_bits_retain(1 << number)) {
            Err(Errno::INVAL) => return Ok(()), // no such capability
            Err(Errno::PERM) => return Ok(()),
            other => other?,
        }
    }
    Ok(())
}

fn switch_user(uid: u32, gid: u32) -> Result<(), Errno> {
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
