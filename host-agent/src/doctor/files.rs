//! Files required by an agent: host.toml, the files in it, and the agent's records.

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use super::{Finding, fix_for, problems_or};
use crate::{
    config::{Config, ConfigError},
    records, secrets,
};

/// Permissions of users other than the owner: all, and those to write.
const OTHERS: u32 = 0o077;
const OTHERS_WRITE: u32 = 0o022;
/// File systems in memory, from linux/magic.h.
const IN_MEMORY: [i64; 2] = [0x0102_1994, 0x9584_58f6];

/// Reports that host.toml is missing or invalid.
pub(super) fn invalid_config(path: &Path, error: &ConfigError) -> Finding {
    let otherwise = format!(
        "write one, see host.example.toml; check it with `host-agent serve --check-config --config {}`",
        path.display()
    );
    let fix = match error {
        ConfigError::Read { errno, .. } => fix_for(errno, &otherwise),
        _ => otherwise,
    };
    Finding::problem("config", units::chain(error), fix)
}

/// Reports a valid host.toml.
pub(super) fn config(path: &Path) -> Finding {
    let problem = open_to(path, OTHERS_WRITE, "config");
    problem.unwrap_or_else(|| Finding::passed("config", format!("{} is in order", path.display())))
}

/// Checks the files in host.toml: secrets are readable by their owner only, and no other user can
/// write the others.
pub(super) fn secrets(config: &Config) -> Vec<Finding> {
    let tls = config.tls.as_ref();
    let closed = config.token_file.iter().chain(tls.map(|tls| &tls.key)).map(|path| (path, OTHERS));
    let shown = tls.into_iter().flat_map(|tls| [&tls.ca, &tls.certificate]).map(|path| (path, OTHERS_WRITE));
    let files: Vec<(&PathBuf, u32)> = closed.chain(shown).collect();
    let problems: Vec<_> =
        files.iter().filter_map(|(path, others)| open_to(path, *others, "secrets")).collect();
    problems_or(problems, || match secrets::read_secrets(config) {
        Ok(_) => Finding::passed("secrets", format!("{} files are in order", files.len())),
        Err(error) => Finding::problem(
            "secrets",
            units::chain(&error),
            "create it again, as in rack.toml or from your certificate authority",
        ),
    })
}

/// Returns excessive permissions of other users, or the reason why they are unknown.
fn open_to(path: &Path, others: u32, check: &'static str) -> Option<Finding> {
    let shown = path.display();
    let mode = match fs::File::open(path).and_then(|file| file.metadata()) {
        Ok(metadata) => metadata.mode() & 0o7777,
        Err(errno) => {
            let fix = fix_for(&errno, "create the file, or name another one in host.toml");
            return Some(Finding::problem(check, format!("read {shown}: {errno}"), fix));
        }
    };
    let (allowed, rule) = if others == OTHERS { (0o600, "read") } else { (0o644, "change") };
    let message = format!("{shown} has mode {mode:04o}: others than its owner may {rule} it");
    (mode & others != 0).then(|| Finding::problem(check, message, format!("`chmod {allowed:o} {shown}`")))
}

/// Checks the directory for local memory of VMMs that take only paths.
pub(super) fn local_dir(dir: Option<&Path>) -> Finding {
    let Some(dir) = dir else {
        return Finding::passed(
            "local_dir",
            "not set: VMMs that take only paths allocate local memory themselves",
        );
    };
    let shown = dir.display();
    let existing = dir.ancestors().find(|folder| folder.exists()).unwrap_or(Path::new("/"));
    match rustix::fs::statfs(existing) {
        Ok(about) if IN_MEMORY.contains(&about.f_type) => {
            Finding::passed("local_dir", format!("{shown} is in memory"))
        }
        Ok(_) => Finding::problem(
            "local_dir",
            format!("{shown} is on a disk: local memory of VMs would be, too"),
            "backend.local_dir in host.toml must be on tmpfs, such as /dev/shm/tarn-local",
        ),
        Err(errno) => Finding::problem(
            "local_dir",
            format!("stat {shown}: {errno}"),
            fix_for(&errno.into(), "name another in host.toml"),
        ),
    }
}

/// Checks the agent's records of VMs, and returns the locations of their slices.
pub(super) fn records(runtime_dir: &Path) -> (Finding, BTreeSet<String>) {
    match records::recorded_vms(runtime_dir) {
        Ok(all) => {
            let places = all.iter().flat_map(|record| record.slices.values());
            let places = places.map(|handle| handle.place.to_string()).collect();
            (Finding::passed("records", format!("{} VMs are recorded", all.len())), places)
        }
        Err(error) => {
            let fix = "run as root; an agent does not start with a corrupt record";
            (Finding::problem("records", units::chain(&error), fix), BTreeSet::new())
        }
    }
}
