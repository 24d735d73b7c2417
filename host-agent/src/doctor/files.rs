//! Checks of the files that an agent needs: host.toml, the files named in it, and its VM records.

use std::{
    collections::BTreeSet,
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use service_files::certificates::WORLD_MODE;
use units::UserId;

use super::{Finding, fix_for, problems_or_passed};
use crate::{
    config::{Config, ConfigError},
    protected_dir::{DirError, LOCAL_DIR_FIELD, ProtectedDir},
    records,
    runtime_dir::RUNTIME_DIR_FIELD,
    secrets,
};

/// Mode bits of the write permissions of users other than the owner.
const NON_OWNER_WRITE_MODE: u32 = 0o022;
/// Magic numbers (linux/magic.h) of the file systems that store files in memory: tmpfs and
/// hugetlbfs.
const IN_MEMORY_FILE_SYSTEMS: [i64; 2] = [0x0102_1994, 0x9584_58f6];

/// Returns one problem if host.toml cannot be read, or else one problem for each rule that it
/// violates.
pub(super) fn invalid_config_findings(path: &Path, error: &ConfigError) -> Vec<Finding> {
    let fix = format!(
        "write it as in host.example.toml, and check it with `host-agent serve --check-config --config {}`",
        path.display()
    );
    match error {
        ConfigError::Read { errno, .. } => {
            vec![Finding::problem("config", units::chain(error), fix_for(errno, &fix))]
        }
        ConfigError::Invalid { path, violations } => {
            let message = |violation| format!("{}: {violation}", path.display());
            violations.iter().map(|violation| Finding::problem("config", message(violation), &*fix)).collect()
        }
    }
}

/// Checks whether users other than the owner can write host.toml.
pub(super) fn check_config(path: &Path) -> Finding {
    let problem = check_permissions(None, path, NON_OWNER_WRITE_MODE);
    problem.unwrap_or_else(|| Finding::passed("config", format!("{} is valid", path.display())))
}

/// Checks the token and TLS files named in host.toml. As in the agent, only the owner may access
/// the token, and only the owner and the group may access the private key. Other users may read,
/// but not write, the certificates.
pub(super) fn check_secrets(config: &Config) -> Vec<Finding> {
    let token = config.token_file.iter().map(|path| (secrets::TOKEN_FIELD, path, secrets::NON_OWNER_MODE));
    let tls = config.tls.iter().flat_map(|tls| {
        [
            (secrets::KEY_FIELD, &tls.key, WORLD_MODE),
            (secrets::CA_FIELD, &tls.ca, NON_OWNER_WRITE_MODE),
            (secrets::CERTIFICATE_FIELD, &tls.certificate, NON_OWNER_WRITE_MODE),
        ]
    });
    let files: Vec<(&str, &PathBuf, u32)> = token.chain(tls).collect();
    let problems: Vec<_> = files
        .iter()
        .filter_map(|(field, path, others)| check_permissions(Some(field), path, *others))
        .collect();
    problems_or_passed(problems, || match secrets::read_secrets(config) {
        Ok(_) => {
            Finding::passed("secrets", format!("{} files are valid, with safe permissions", files.len()))
        }
        Err(error) => Finding::problem(
            "secrets",
            units::chain(&error),
            "write the token of rack.toml to the file, or request a new certificate from your certificate authority",
        ),
    })
}

/// Reports a file if its mode contains any of the bits `others`, or if it is not a readable file.
/// `field` is the key of the file in host.toml; `None` for host.toml itself.
fn check_permissions(field: Option<&str>, path: &Path, others: u32) -> Option<Finding> {
    let path_text = path.display();
    let problem = |message: String, fix: &str| {
        let (check, message) = match field {
            None => ("config", message),
            Some(field) => ("secrets", format!("{field}: {message}")),
        };
        Some(Finding::problem(check, message, fix))
    };
    let fix = "create the file, or correct its path in host.toml";
    let metadata = match config_file::open_regular(path).and_then(|file| file.metadata()) {
        Ok(metadata) => metadata,
        Err(errno) => {
            return problem(format!("cannot read {path_text}: {errno}"), &fix_for(&errno, fix));
        }
    };
    let mode = metadata.mode() & secrets::MODE_MASK;
    if mode & others == 0 {
        return None;
    }
    let (risk, allowed) = match others {
        secrets::NON_OWNER_MODE => ("users other than its owner can access it", "600"),
        WORLD_MODE => ("users other than its owner and group can access it", "o="),
        _ => ("users other than its owner can change it", "644"),
    };
    problem(format!("{path_text} has mode {mode:04o}: {risk}"), &format!("`chmod {allowed} {path_text}`"))
}

/// Checks that only `user`, the agent's user, and root can change the runtime directory.
pub(super) fn check_runtime_dir(dir: &Path, user: UserId) -> Finding {
    unprotected_dir("runtime_dir", RUNTIME_DIR_FIELD, dir, user).unwrap_or_else(|| {
        Finding::passed("runtime_dir", format!("only the agent's user can change {}", dir.display()))
    })
}

/// Reports a directory that another user than `user` and root can change. The agent creates a
/// missing directory.
fn unprotected_dir(check: &'static str, field: &'static str, dir: &Path, user: UserId) -> Option<Finding> {
    let error = match ProtectedDir::open_for(field, dir, user) {
        Ok(_) => return None,
        Err(DirError::Io { errno, .. }) if errno.kind() == io::ErrorKind::NotFound => return None,
        Err(error) => error,
    };
    let fix = match &error {
        DirError::Io { errno, .. } => fix_for(errno, "correct the path in host.toml"),
        DirError::ForeignOwner { .. } => {
            "remove the directory, or choose another path in host.toml; then restart the agent".to_owned()
        }
        DirError::Writable { path, .. } => format!("`chmod go-w {}`", path.display()),
        DirError::Accessible { path, .. } => format!("`chmod 700 {}`", path.display()),
    };
    Some(Finding::problem(check, units::chain(&error), fix))
}

/// Checks that `backend.local_dir` is on a file system in memory, and that only `user`, the agent's
/// user, and root can change it. It contains the local memory of VMs whose VMM accepts only paths.
pub(super) fn check_local_dir(dir: Option<&Path>, user: UserId) -> Finding {
    let Some(dir) = dir else {
        return Finding::passed(
            "local_dir",
            "backend.local_dir is not set: VMMs that accept only paths allocate local memory themselves",
        );
    };
    if let Some(problem) = unprotected_dir("local_dir", LOCAL_DIR_FIELD, dir, user) {
        return problem;
    }
    let dir_text = dir.display();
    let existing = dir.ancestors().find(|folder| folder.exists()).unwrap_or(Path::new("/"));
    match rustix::fs::statfs(existing) {
        Ok(about) if IN_MEMORY_FILE_SYSTEMS.contains(&about.f_type) => {
            Finding::passed("local_dir", format!("{dir_text} is in memory"))
        }
        Ok(_) => Finding::problem(
            "local_dir",
            format!("backend.local_dir: {dir_text} is on a disk, so local memory of VMs would be on a disk"),
            "set backend.local_dir in host.toml to a path on tmpfs, such as /dev/shm/tarn-local",
        ),
        Err(errno) => Finding::problem(
            "local_dir",
            format!("cannot read the file system of {dir_text}: {errno}"),
            fix_for(&errno.into(), "set backend.local_dir in host.toml to another path"),
        ),
    }
}

/// Checks whether the agent's VM records can be read. Also returns the locations of the slices in
/// these records.
pub(super) fn check_records(runtime_dir: &Path) -> (Finding, BTreeSet<String>) {
    match records::recorded_vms(runtime_dir) {
        Ok(all) => {
            let recorded_slices = all.iter().flat_map(|record| record.slices.values());
            let recorded_slices = recorded_slices.map(|handle| handle.place.to_string()).collect();
            (Finding::passed("records", format!("{} VMs are recorded", all.len())), recorded_slices)
        }
        Err(error) => {
            let fix = "run as root; an agent with a corrupt record does not start";
            (Finding::problem("records", units::chain(&error), fix), BTreeSet::new())
        }
    }
}
