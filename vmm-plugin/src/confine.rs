//! Privileges that this process gives up before its guest runs, as a guest may break out into it. As root it becomes another user
//! in an empty read-only file system, unless it is started with `--unconfined`. All that it needs is open by then, and its
//! threads start later: capabilities, user IDs and no_new_privs are per thread. System calls are filtered by [`threads`].

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

/// Options for what is given up beside capabilities.
#[derive(Clone, Debug, clap::Args)]
pub struct Confinement {
    /// The user that the process becomes once everything is open, by number; needs --gid. Required when started as root
    #[arg(long, value_name = "NUMBER", requires = "gid", value_parser = unprivileged_id())]
    uid: Option<u32>,
    /// The only group of the process from then on, by number; needs --uid
    #[arg(long, value_name = "NUMBER", requires = "uid", value_parser = unprivileged_id())]
    gid: Option<u32>,
    /// The only directory that the process sees from then on; must be empty [default as root: an empty read-only file system]
    #[arg(long, value_name = "DIR")]
    chroot: Option<PathBuf>,
    /// Started as root, stay root and see all files; capabilities are dropped and system calls filtered all the same
    #[arg(long, conflicts_with_all = ["uid", "gid", "chroot"])]
    unconfined: bool,
    /// Action on a system call that a thread does not need: true ends the process, log writes to the audit log, false allows it
    #[arg(long, value_enum, hide_possible_values = true, default_value_t, value_name = "true|false|log")]
    pub seccomp: Seccomp,
}

/// All IDs but root's and the one that means "unchanged".
fn unprivileged_id() -> clap::builder::RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(1..i64::from(u32::MAX))
}

/// What becomes of a system call that a thread does not need.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Seccomp {
    /// It ends the process.
    #[default]
    True,
    /// It is made, as any other.
    False,
    /// It is made, and the kernel's audit log tells of it.
    Log,
}

/// Why this process cannot be confined.
#[derive(Debug, thiserror::Error)]
pub enum ConfineError {
    /// Started as root without a user to become.
    #[error(
        "uid: missing: as root, --uid NUMBER and --gid NUMBER must name an unprivileged user to become, or --unconfined be given"
    )]
    MissingUser,
    /// The operating system refuses.
    #[error("{option}: cannot {doing}{hint}")]
    System {
        /// Which option.
        option: &'static str,
        /// What was tried.
        doing: String,
        /// What may help.
        hint: &'static str,
        /// Why not.
        #[source]
        errno: io::Error,
    },
    /// A folder with something in it that a guest which broke out would see.
    #[error("chroot: {} is not empty: must be", .0.display())]
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

/// As many descriptors as this process may have: each slice is one.
///
/// # Errors
/// None that a kernel is known for.
pub fn raise_file_limit() -> io::Result<()> {
    let Rlimit { maximum, .. } = rustix::process::getrlimit(Resource::Nofile);
    Ok(rustix::process::setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })?)
}

impl Confinement {
    /// Checks everything that [`PreparedConfinement::enter`] needs, and changes nothing.
    ///
    /// # Errors
    /// [`ConfineError::MissingUser`] if root is not to be given up, or another variant if something cannot be given up.
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
                .map_err(error("chroot", format!("make {display_name} all there is")))?;
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
    error("uid", format!("become user {uid} and group {gid}"))
}

/// Fails as the kernel would without these capabilities.
fn require_capabilities(needed: CapabilitySet) -> Result<(), Errno> {
    if capabilities(None)?.effective.contains(needed) { Ok(()) } else { Err(Errno::PERM) }
}

/// The directory that becomes the root directory.
#[derive(Debug)]
struct Root {
    directory: OwnedFd,
    /// Its name in messages.
    display_name: String,
}

/// A confinement that can be entered.
#[derive(Debug)]
pub struct PreparedConfinement {
    user: Option<(u32, u32)>,
    root: Option<Root>,
    /// How system calls are filtered.
    pub seccomp: Seccomp,
}

impl PreparedConfinement {
    /// Gives everything up, for good. This process must have no other thread yet.
    ///
    /// # Errors
    /// [`ConfineError`]: then nothing may run.
    pub fn enter(self) -> Result<(), ConfineError> {
        set_no_new_privs(true).map_err(error("capabilities", "give up getting more"))?;
        if let Some(root) = self.root {
            root::enter(&root)
                .map_err(error("chroot", format!("make {} all there is", root.display_name)))?;
        }
        empty_bounding_set().map_err(error("capabilities", "give up those that are never needed"))?;
        if let Some((uid, gid)) = self.user {
            become_user(uid, gid).map_err(user_error(uid, gid))?;
        }
        drop_capabilities().map_err(error("capabilities", "give them up"))
    }
}

/// Whoever may not do so has nothing to win from the set either: there are no new privileges.
fn empty_bounding_set() -> Result<(), Errno> {
    for number in 0..u64::BITS {
        match remove_capability_from_bounding_set(CapabilitySet::from_bits_retain(1 << number)) {
            Err(Errno::INVAL) => return Ok(()), // past the last that this kernel knows
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
