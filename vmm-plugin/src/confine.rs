//! What this process gives up before its guest runs, as a guest may break out into it: from then on it is some user without
//! capabilities, in some folder. What it needs is open by then, and its threads start after it: capabilities, users and the
//! promise to gain none are each thread's own. Which system calls a thread may make is `calls`' business.

pub mod calls;
pub mod forbidden;
pub mod threads;

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use rustix::{
    io::Errno,
    process::{Gid, Resource, Rlimit, Uid},
    thread::{
        CapabilitySet, CapabilitySets, clear_ambient_capability_set, remove_capability_from_bounding_set,
        set_capabilities, set_no_new_privs, set_thread_groups, set_thread_res_gid, set_thread_res_uid,
    },
};

/// What is given up beside capabilities.
#[derive(Clone, Debug, clap::Args)]
pub struct Confinement {
    /// The user that the process is once everything is open, by number; wants --gid
    #[arg(long, value_name = "NUMBER", requires = "gid", value_parser = user_number())]
    uid: Option<u32>,
    /// The only group that the process is in by then, by number; wants --uid
    #[arg(long, value_name = "NUMBER", requires = "uid", value_parser = user_number())]
    gid: Option<u32>,
    /// The only folder that the process sees by then; it must be empty
    #[arg(long, value_name = "DIR")]
    chroot: Option<PathBuf>,
    /// What becomes of a system call that a thread does not need: true ends the process, log tells of it, false lets it pass
    #[arg(long, value_enum, hide_possible_values = true, default_value_t, value_name = "true|false|log")]
    pub seccomp: Seccomp,
}

/// All numbers but the one that means "leave it as it is".
fn user_number() -> clap::builder::RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(..i64::from(u32::MAX))
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

/// Why something could not be given up.
#[derive(Debug, thiserror::Error)]
pub enum ConfineError {
    /// The operating system refuses.
    #[error("{option}: cannot {doing}{hint}")]
    Refused {
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

fn refused<E: Into<io::Error>>(
    option: &'static str,
    doing: impl Into<String>,
) -> impl FnOnce(E) -> ConfineError {
    move |error| {
        let (doing, errno) = (doing.into(), error.into());
        let hint = match errno.raw_os_error().map(Errno::from_raw_os_error) {
            Some(Errno::PERM) => "; must be started as root",
            _ => "",
        };
        ConfineError::Refused { option, doing, hint, errno }
    }
}

/// As many descriptors as this process may have: each slice is one.
///
/// # Errors
/// None that a kernel is known for.
pub fn open_many_files() -> io::Result<()> {
    let Rlimit { maximum, .. } = rustix::process::getrlimit(Resource::Nofile);
    Ok(rustix::process::setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })?)
}

impl Confinement {
    /// Gives everything up, for good. This process must have no other thread yet.
    ///
    /// # Errors
    /// [`ConfineError`]: then nothing may run.
    pub fn enter(&self) -> Result<(), ConfineError> {
        set_no_new_privs(true).map_err(refused("capabilities", "give up getting more"))?;
        self.chroot.as_deref().map_or(Ok(()), enter_folder)?;
        empty_bounding_set().map_err(refused("capabilities", "give up those that are never needed"))?;
        if let Some((uid, gid)) = self.uid.zip(self.gid) {
            become_user(uid, gid).map_err(refused("uid", format!("become user {uid} and group {gid}")))?;
        }
        drop_capabilities().map_err(refused("capabilities", "give them up"))
    }
}

fn enter_folder(path: &Path) -> Result<(), ConfineError> {
    let shown = path.display();
    let mut content = fs::read_dir(path).map_err(refused("chroot", format!("look into {shown}")))?;
    if content.next().is_some() {
        return Err(ConfineError::NotEmpty(path.to_owned()));
    }
    rustix::process::chdir(path).map_err(refused("chroot", format!("go to {shown}")))?;
    rustix::process::chroot(".").map_err(refused("chroot", format!("make {shown} all there is")))
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
