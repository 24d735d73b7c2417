//! Checks of the requirements of soft memory: memory of the host, pressure stall information, users, and a daemon that
//! answers on a socket that these users can reach.

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use nix::unistd::{Uid, User};
use soft::{client::ConnectError, protocol::Refusal};
use units::{Bytes, UserId};

use super::{Finding, Machine, problems_or_passed};
use crate::{
    config::{Config, soft_memory::SoftMemory},
    soft_memory::{pressure::parse_meminfo, socket_path},
};

/// Name of the checks.
const CHECK: &str = "soft memory";
/// Mode bit with which users other than the owner and the group can use the files in a folder.
const OTHERS_SEARCH: u32 = 0o001;
/// Mode bits of reading and writing for all users, which a client of the socket needs.
const CONNECT_MODE: u32 = 0o666;

/// Runs all checks for soft memory. `is_running` is whether the agent runs, which contains the daemon.
pub(super) fn check_soft_memory(
    machine: &Machine,
    config: &Config,
    settings: &SoftMemory,
    is_running: bool,
) -> Vec<Finding> {
    let (socket, users) = (config.soft_memory_socket(), settings.users(&config.allowed_uids));
    let problems = check_memory(machine, settings)
        .into_iter()
        .chain(check_pressure(machine))
        .chain(check_socket(&socket, is_running))
        .chain(check_folders(&socket, users))
        .collect();
    let mut findings = problems_or_passed(problems, || {
        let state =
            if is_running { "the daemon answers on" } else { "the agent, which does not run, will create" };
        Finding::passed(CHECK, format!("{state} {}", socket.display()))
    });
    findings.extend(check_size(machine, settings));
    findings.push(check_users(users));
    findings
}

fn problem(message: String, fix: impl Into<String>) -> Finding {
    Finding::problem(CHECK, message, fix)
}

/// Returns a value of /proc/meminfo, or 0 if it cannot be read.
fn memory(machine: &Machine, name: &str) -> Bytes {
    let meminfo = machine.proc.text("meminfo").unwrap_or_default();
    parse_meminfo(&meminfo, name).unwrap_or(Bytes::new(0))
}

/// Compares the reserve with the memory of the host, whether it is in use or not.
fn check_memory(machine: &Machine, settings: &SoftMemory) -> Option<Finding> {
    let (total, available) = (memory(machine, "MemTotal"), memory(machine, "MemAvailable"));
    let reserve = settings.reserve;
    if reserve >= total {
        let message = format!(
            "soft_memory.reserve_mib: the reserve of {reserve} is all memory of this host ({total}), which leaves none \
             for soft memory"
        );
        return Some(problem(message, "set soft_memory.reserve_mib to a smaller size"));
    }
    // Soft memory uses all memory above the reserve, so that less than the reserve may be available for a short time.
    if available.get() < reserve.get() / 2 {
        let message =
            format!("{available} is available, which is less than half of the reserve of {reserve}");
        let fix = "start fewer programs or VMs on this host: soft memory gives its pages up, and stays small";
        return Some(problem(message, fix));
    }
    None
}

/// Reports a size that soft memory cannot reach. This is no problem, because the size follows the memory of the host.
fn check_size(machine: &Machine, settings: &SoftMemory) -> Option<Finding> {
    let SoftMemory { size, reserve, .. } = *settings;
    let total = memory(machine, "MemTotal");
    let usable = total.get().saturating_sub(reserve.get());
    (size.get() > usable && usable > 0).then(|| Finding {
        fix: Some(format!("set soft_memory.size_mib to at most {}", Bytes::new(usable).get() >> 20)),
        ..Finding::passed(
            CHECK,
            format!("soft memory cannot reach its size of {size}: this host has {total}, of which {reserve} stays available"),
        )
    })
}

fn check_pressure(machine: &Machine) -> Option<Finding> {
    (machine.proc.text("pressure/memory").is_err()).then(|| {
        problem(
            "without pressure stall information, waiting processes do not count as a shortage of memory"
                .to_owned(),
            "boot a kernel with CONFIG_PSI, and with the parameter psi=1",
        )
    })
}

/// Checks the socket of a running agent, and whether its daemon answers.
fn check_socket(socket: &Path, is_running: bool) -> Option<Finding> {
    let path = socket.display();
    let restart = "`systemctl restart host-agent`: processes keep their soft memory";
    match socket_path(socket).exists() {
        Err(error) => {
            return Some(problem(units::chain(&error), "remove the file, or set soft_memory.socket"));
        }
        Ok(_) if !is_running => return None,
        Ok(false) => {
            let message =
                format!("the agent does not listen on {path}: it began to run before [soft_memory] was set");
            return Some(problem(message, restart));
        }
        Ok(true) => {}
    }
    let mode = fs::metadata(socket).map_or(0, |metadata| metadata.mode());
    if mode & CONNECT_MODE != CONNECT_MODE {
        let message = format!("{path} has mode {:04o}: other users cannot connect", mode & 0o7777);
        return Some(problem(message, format!("`chmod 666 {path}`: the daemon checks the user itself")));
    }
    match soft::client::connect(socket, 1) {
        // A user that may not use soft memory also receives an answer.
        Ok(_) | Err(ConnectError::Refused { reason: Refusal::UserNotAllowed, .. }) => None,
        Err(error) => Some(problem(units::chain(&error), restart)),
    }
}

/// Checks that the users can reach the socket through all folders. A folder that its group can use counts as usable.
fn check_folders(socket: &Path, users: &BTreeSet<UserId>) -> Option<Finding> {
    let is_closed = |folder: &&Path| {
        let metadata = fs::metadata(folder);
        metadata.is_ok_and(|metadata| {
            let is_owner = |user: &UserId| *user == UserId::ROOT || user.get() == metadata.uid();
            metadata.mode() & (OTHERS_SEARCH | OTHERS_SEARCH << 3) == 0 && !users.iter().all(is_owner)
        })
    };
    let folder: PathBuf = socket.ancestors().skip(1).find(is_closed)?.to_owned();
    let (folder, path) = (folder.display(), socket.display());
    let message =
        format!("only the owner of {folder} can use the files in it: other users cannot reach {path}");
    Some(problem(
        message,
        format!("`chmod o+x {folder}`, or set soft_memory.socket to a path in another folder"),
    ))
}

/// Reports the users that may use soft memory. Users of containers need no entry in the user database, so this check
/// always passes.
fn check_users(users: &BTreeSet<UserId>) -> Finding {
    let name = |user: &UserId| User::from_uid(Uid::from_raw(user.get())).ok().flatten().map(|user| user.name);
    let unknown: Vec<String> =
        users.iter().filter(|user| name(user).is_none()).map(UserId::to_string).collect();
    let known: Vec<String> = users.iter().filter_map(name).collect();
    if unknown.is_empty() {
        return Finding::passed(CHECK, format!("these users may use soft memory: {}", known.join(", ")));
    }
    Finding {
        fix: Some(
            "if these are not users of containers, correct soft_memory.allowed_uids or agent.allowed_uids"
                .to_owned(),
        ),
        ..Finding::passed(
            CHECK,
            format!("no user has the ID {}, which may use soft memory", unknown.join(", ")),
        )
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::{fs::PermissionsExt as _, net::UnixListener};

    use super::*;
    use crate::host::{sysfs::Sysfs, sysfs::fake::FakeSysfs};

    const MEMINFO: &str = "MemTotal: 4194304 kB\nMemFree: 1 kB\nMemAvailable: 2097152 kB\n";

    /// Machine with 4 GiB of memory, and the path of a socket.
    fn machine() -> (FakeSysfs, Machine, PathBuf) {
        let fake = FakeSysfs::new(&[("proc/meminfo", MEMINFO), ("proc/pressure/memory", "some total=0")]);
        fs::create_dir_all(fake.path("run")).unwrap();
        fs::set_permissions(fake.path(""), fs::Permissions::from_mode(0o755)).unwrap();
        let machine = Machine { proc: Sysfs::at(fake.path("proc")), ..Machine::this() };
        let socket = fake.path("run/soft-memory.sock");
        (fake, machine, socket)
    }

    fn findings(machine: &Machine, socket: &Path, keys: &str, is_running: bool) -> Vec<Finding> {
        let text = format!(
            "[agent]\nhost = \"h0\"\nruntime_dir = \"run\"\ntoken_file = \"t\"\n[backend]\nkind = \"emulated\"\n\
             [soft_memory]\nsocket = {socket:?}\n{keys}"
        );
        let config = Config::parse(&text, Path::new("/etc/tarn/host.toml")).unwrap();
        let settings = config.soft_memory.as_ref().unwrap();
        check_soft_memory(machine, &config, settings, is_running)
    }

    /// Returns the only problem, or an empty text.
    fn only_problem(machine: &Machine, socket: &Path, keys: &str, is_running: bool) -> String {
        let all = findings(machine, socket, keys, is_running);
        let problems: Vec<&Finding> = all.iter().filter(|finding| !finding.ok).collect();
        assert!(problems.len() <= 1, "{problems:?}");
        problems.first().map_or(String::new(), |problem| problem.message.clone())
    }

    #[test]
    fn memory_of_the_host_must_exceed_the_reserve() {
        let (_fake, machine, socket) = machine();
        let problem = |keys: &str| only_problem(&machine, &socket, keys, false);
        assert_eq!(problem("size_mib = 3584"), "");
        assert_eq!(
            problem("size_mib = 64\nreserve_mib = 4096"),
            "soft_memory.reserve_mib: the reserve of 4GiB is all memory of this host (4GiB), which leaves none for soft \
             memory"
        );
        assert_eq!(problem("size_mib = 64\nreserve_mib = 4095"), "");
        let (fake, machine, socket) = self::machine();
        fake.files("proc", &[("meminfo", "MemTotal: 4194304 kB\nMemAvailable: 261120 kB\n")]);
        assert_eq!(
            only_problem(&machine, &socket, "size_mib = 64", false),
            "255MiB is available, which is less than half of the reserve of 512MiB"
        );
        let large = findings(&machine, &socket, "size_mib = 5000\nreserve_mib = 1", false);
        assert!(
            large[1].ok && large[1].message.starts_with("soft memory cannot reach its size"),
            "{large:?}"
        );
        assert_eq!(large[1].fix.as_deref(), Some("set soft_memory.size_mib to at most 4095"));
    }

    #[test]
    fn missing_pressure_stall_information_is_a_problem() {
        let (fake, machine, socket) = machine();
        fs::remove_file(fake.path("proc/pressure/memory")).unwrap();
        let problem = only_problem(&machine, &socket, "size_mib = 64", false);
        assert!(problem.starts_with("without pressure stall information"), "{problem}");
    }

    #[test]
    fn socket_must_be_one_that_the_users_can_reach() {
        let (fake, machine, socket) = machine();
        let problem = |keys: &str, is_running| {
            only_problem(&machine, &socket, &format!("size_mib = 64\n{keys}"), is_running)
        };
        assert!(problem("", true).starts_with("the agent does not listen on "));
        fs::set_permissions(fake.path("run"), fs::Permissions::from_mode(0o700)).unwrap();
        let closed = problem("allowed_uids = [65534]", false);
        assert!(closed.starts_with("only the owner of ") && closed.contains("/run can use"), "{closed}");
        let owner = fs::metadata(fake.path("run")).unwrap().uid();
        assert_eq!(problem(&format!("allowed_uids = [{owner}]"), false), "");
        fs::set_permissions(fake.path("run"), fs::Permissions::from_mode(0o755)).unwrap();
        fs::write(&socket, "").unwrap();
        assert!(problem("", false).contains("is not a socket"));
        fs::remove_file(&socket).unwrap();
        // A socket of another type, on which no daemon answers.
        let _listener = UnixListener::bind(&socket).unwrap();
        fs::set_permissions(&socket, fs::Permissions::from_mode(0o600)).unwrap();
        assert!(problem("", true).ends_with("has mode 0600: other users cannot connect"));
        fs::set_permissions(&socket, fs::Permissions::from_mode(0o666)).unwrap();
        assert!(problem("", true).starts_with("cannot connect to the soft memory daemon at "));
    }

    #[test]
    fn users_are_shown_by_name() {
        let shown = |uid| check_users(&BTreeSet::from([UserId::ROOT, UserId::new(uid).unwrap()]));
        assert_eq!(shown(0).message, "these users may use soft memory: root");
        let unknown = shown(4_000_000_000);
        assert!(unknown.ok && unknown.fix.is_some());
        assert_eq!(unknown.message, "no user has the ID 4000000000, which may use soft memory");
    }
}
