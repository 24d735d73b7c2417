//! Valid and invalid `rack.toml` files, with the errors reported to the operator.

use std::fs;

use super::*;
use crate::role::Role;

const RACK: &str = r#"
[manager]
listen = "127.0.0.1:9750"
store = "store"

[[emc]]
name = "emc0"
slices = 64
driver = "emulated"
path = "/dev/shm/emc0"

[[emc]]
name = "emc1"
slices = 64
driver = "emulated"
path = "emc1"

[[host]]
name = "h0"
cores = 32
local_mib = 65536
emcs = ["emc0", "emc1"]
"#;

fn parse(text: &str) -> Result<Config, ConfigError> {
    Config::parse(text, Path::new("/etc/tarn/rack.toml"))
}

fn rack() -> Config {
    parse(RACK).unwrap()
}

/// Returns the validation errors of [`RACK`] after `part` is replaced once by `replacement`.
fn error_of(part: &str, replacement: &str) -> String {
    assert!(RACK.contains(part), "{part:?} is not in the rack");
    let error = parse(&RACK.replacen(part, replacement, 1)).expect_err(replacement).to_string();
    error.replace("/etc/tarn/rack.toml: ", "")
}

#[track_caller]
fn check(part: &str, replacement: &str, expected: &str) {
    assert_eq!(error_of(part, replacement), expected);
}

/// Returns `text` with one block uncommented: the block whose first line is `# {first}`.
fn uncomment(text: &str, first: &str) -> String {
    let blocks = text.split("\n\n").map(|block| match block.starts_with(&format!("# {first}")) {
        true => block.lines().map(|line| line.trim_start_matches("# ")).collect::<Vec<_>>().join("\n"),
        false => block.to_owned(),
    });
    blocks.collect::<Vec<_>>().join("\n\n")
}

#[test]
fn example_rack_is_valid() {
    let path = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/rack.example.toml"));
    let config = Config::load(path).unwrap();
    assert_eq!((config.emcs.len(), config.hosts.len()), (2, 4));
    assert_eq!(config.manager.listen, Listen::Unix(DEFAULT_SOCKET_PATH.into()));
    let text = fs::read_to_string(path).unwrap();
    let fence = uncomment(&text, "[fence]");
    assert!(Config::parse(&fence, path).unwrap().fence.is_some());
    let tls = uncomment(&text, "[tls]").replace("unix:/run/tarn/manager.sock", "10.0.0.1:9750");
    assert!(Config::parse(&tls, path).unwrap().tls.is_some());
    let access = uncomment(&text, "[access]").replace("\"tarn\"", "\"0\"");
    let access = access.replace("\"nova\"", "\"1\"").replace("\"operator\"", "\"2\"");
    assert_eq!(Config::parse(&access, path).unwrap().access.group, Some(0));
    let shared = uncomment(&fence, "[[emc]]");
    assert_eq!(Config::parse(&shared, path).unwrap().emcs[2].driver, Driver::SharedDax);
}

#[test]
fn optional_sections_have_defaults() {
    let config = rack();
    assert_eq!(config.lease, Lease { ttl: Ns::secs(10), fence_after: Some(Ns::secs(600)) });
    assert_eq!(config.policy.commit_within, COMMIT_TIMEOUT_DEFAULT);
    assert_eq!((config.tls, config.manager.metrics_listen), (None, None));
}

#[test]
fn qos_section_sets_when_memory_is_moved() {
    let of =
        |value: &str| parse(&RACK.replacen("[[emc]]", &format!("[qos]\nrehome = {value}\n\n[[emc]]"), 1));
    assert_eq!(rack().qos.rehome, RehomePolicy::Ask);
    for (value, policy) in
        [("\"never\"", RehomePolicy::Never), ("\"ask\"", RehomePolicy::Ask), ("\"auto\"", RehomePolicy::Auto)]
    {
        assert_eq!(of(value).unwrap().qos.rehome, policy);
    }
    for value in ["\"always\"", "\"Auto\"", "true"] {
        let error = of(value).unwrap_err().to_string();
        assert!(error.contains(&format!("line 7: qos.rehome = {value}: must be ")), "{error}");
    }
}

#[test]
fn prediction_section_sets_limits_and_retention() {
    let of = |lines: &str| parse(&RACK.replacen("[[emc]]", &format!("[prediction]\n{lines}\n\n[[emc]]"), 1));
    assert_eq!(of("").unwrap().prediction, Settings::default());
    let settings = of("exceed_max = 0.01\noverpredicted_exceeds = 0.5\nkeep_s = 86400").unwrap().prediction;
    assert_eq!((settings.limits.exceed_max.get(), settings.retention), (0.01, Ns::secs(86400)));
    assert_eq!(settings.limits.overpredicted_exceeds.get(), 0.5);
    for (lines, expected) in [
        ("exceed_max = 2", "line 7: prediction.exceed_max = 2: must be a fraction from 0 to 1"),
        (
            "keep_s = 60",
            "line 7: prediction.keep_s = 60: must be a number of seconds from 86400 to 316224000",
        ),
        ("exceed = 0.1", "line 7: prediction.exceed: unknown key"),
    ] {
        let error = of(lines).expect_err(lines).to_string();
        assert!(error.replace("/etc/tarn/rack.toml: ", "").starts_with(expected), "{error}");
    }
}

#[test]
fn relative_paths_are_relative_to_the_file() {
    let config = rack();
    assert_eq!(config.manager.folder, Path::new("/etc/tarn/store"));
    assert_eq!(config.emcs[1].path, Path::new("/etc/tarn/emc1"));
    let socket = parse(&RACK.replace("127.0.0.1:9750", "unix:run/manager.sock")).unwrap();
    assert_eq!(socket.manager.listen, Listen::Unix("/etc/tarn/run/manager.sock".into()));
}

#[test]
fn lease_times_may_be_fractional_and_fencing_disabled() {
    let config = parse(&format!("{RACK}\n[lease]\nttl_s = 0.5\nfence_after_s = \"never\"")).unwrap();
    assert_eq!(config.lease, Lease { ttl: Ns::ms(500), fence_after: None });
    let config = parse(&format!("{RACK}\n[lease]\nttl_s = 1\nfence_after_s = 2.5")).unwrap();
    assert_eq!(config.lease, Lease { ttl: Ns::secs(1), fence_after: Some(Ns::ms(2500)) });
}

#[test]
fn unknown_key_is_an_error() {
    check(
        "store =",
        "stroe =",
        "line 2: manager.store: is missing\nline 4: manager.stroe: unknown key; must be one of listen, store, state_dir, metrics_listen",
    );
    check(
        "[[host]]",
        "[[hosts]]",
        "host: at least one [[host]] is required\nline 18: hosts: unknown key; must be one of etcd, manager, lease, policy, prediction, qos, fence, access, tls, emc, host",
    );
    check(
        "cores = 32",
        "cores = 32\ncoers = 33",
        "line 21: host[0].coers: unknown key; must be one of name, cores, local_mib, emcs, token_sha256",
    );
}

#[test]
fn invalid_list_of_tables_is_not_also_reported_as_missing() {
    let (before_emcs, rest) = RACK.split_once("[[emc]]").unwrap();
    let emcs = format!("emc = 7\n{before_emcs}{}", &rest[rest.find("[[host]]").unwrap()..]);
    let error = parse(&emcs).unwrap_err().to_string();
    assert!(error.contains("line 1: emc = 7: must be a list"), "{error}");
    assert!(!error.contains("at least one"), "{error}");
    let host = |i| format!("[[host]]\nname = \"x{i}\"\ncores = 1\nlocal_mib = 1\nemcs = [\"emc0\"]\n");
    let hosts: String = (0..HOSTS_MAX).map(host).collect();
    let error = parse(&format!("{RACK}{hosts}")).unwrap_err().to_string();
    assert!(
        error.contains(&format!("has {} items: must have at most {HOSTS_MAX}", HOSTS_MAX + 1)),
        "{error}"
    );
    assert!(!error.contains("at least one"), "{error}");
}

#[test]
fn listen_addresses_without_a_fixed_place_are_rejected() {
    let file = "must end with the name of a file, such as /run/tarn/manager.sock";
    let abstract_socket = "must be the path of a file: every local user can connect to an abstract socket";
    let port = "must have a port from 1 to 65535, because clients cannot find another port";
    for (value, rule) in [
        ("unix:/", file),
        ("unix:/run/tarn/", file),
        ("unix:/run/..", file),
        ("unix:run/.", file),
        ("unix:@manager", abstract_socket),
        ("127.0.0.1:0", port),
    ] {
        let expected = format!("line 3: manager.listen = \"{value}\": {rule}");
        check("\"127.0.0.1:9750\"", &format!("\"{value}\""), &expected);
    }
    check(
        "store =",
        "metrics_listen = \"127.0.0.1:0\"\nstore =",
        &format!("line 4: manager.metrics_listen = \"127.0.0.1:0\": {port}"),
    );
}

#[test]
fn host_with_unknown_or_repeated_emcs_is_rejected() {
    check(r#"["emc0", "emc1"]"#, "[]", "line 22: host[0].emcs = []: must name at least one EMC");
    check(
        r#""emc1"]"#,
        r#""emc2"]"#,
        "line 22: host[0].emcs[1] = \"emc2\": no such EMC; must be one of emc0, emc1",
    );
    check(r#""emc1"]"#, r#""emc0"]"#, "line 22: host[0].emcs[1] = \"emc0\": is a duplicate: must be unique");
    check(r#"["emc0", "emc1"]"#, "\"emc0\"", "line 22: host[0].emcs = \"emc0\": must be a list");
}

#[test]
fn duplicate_names_and_paths_are_rejected() {
    check(
        "\"emc1\"",
        "\"emc0\"",
        "line 13: emc[1].name = \"emc0\": is a duplicate: must be unique\nline 22: host[0].emcs[1] = \"emc1\": no such EMC; must be one of emc0",
    );
    check(
        "path = \"emc1\"",
        "path = \"/dev/shm/emc0\"",
        "line 16: emc[1].path = \"/dev/shm/emc0\": is already emc[0].path: must be unique",
    );
    check(
        "path = \"emc1\"",
        "path = \"./store\"",
        "line 16: emc[1].path = \"./store\": is already manager.store: must be unique",
    );
    let second = "[[host]]\nname = \"h0\"\ncores = 1\nlocal_mib = 1\nemcs = [\"emc0\"]\n\n[[host]]";
    check("[[host]]", second, "line 25: host[1].name = \"h0\": is a duplicate: must be unique");
}

#[test]
fn token_shared_by_two_hosts_is_rejected() {
    let token = format!("token_sha256 = \"{}\"", "0a".repeat(32));
    let second = format!("[[host]]\nname = \"h1\"\ncores = 1\nlocal_mib = 1\nemcs = [\"emc0\"]\n{token}");
    let error = parse(&format!("{RACK}{token}\n{second}")).unwrap_err().to_string();
    assert!(error.contains("line 29: host[1].token_sha256 = "), "{error}");
    assert!(error.ends_with("is a duplicate: must be unique"), "{error}");
    check(
        "cores = 32",
        "cores = 32\ntoken_sha256 = \"0A\"",
        "line 21: host[0].token_sha256 = \"0A\": must be 64 hexadecimal digits (0-9, a-f)",
    );
}

#[test]
fn sizes_outside_their_limits_are_rejected() {
    for (value, line) in
        [("0", 8), ("-1", 8), ("16385", 8), ("6.5", 8), ("\"64\"", 8), ("99999999999999999999", 8)]
    {
        let expected =
            format!("line {line}: emc[0].slices = {value}: must be a whole number from 1 to 16384");
        check("slices = 64", &format!("slices = {value}"), &expected);
    }
    check("cores = 32", "cores = 0", "line 20: host[0].cores = 0: must be a whole number from 1 to 4096");
    check("65536", "0", "line 21: host[0].local_mib = 0: must be a whole number from 1 to 67108864");
    let full = "[[emc]]\nname = \"e\"\nslices = 16384\ndriver = \"emulated\"\npath = \"e\"\n";
    let many: String = (0..16).map(|i| full.replace("\"e\"", &format!("\"x{i}\""))).collect();
    let error = parse(&format!("{RACK}{many}")).unwrap_err().to_string();
    assert!(
        error.ends_with(
            "emc[17].slices = 16384: all EMCs together have at least 262272 slices: must have at most 262144"
        ),
        "{error}"
    );
}

#[test]
fn non_loopback_address_requires_tls() {
    check(
        "127.0.0.1:9750",
        "localhost",
        "line 3: manager.listen = \"localhost\": must be an IP address and a port, such as 127.0.0.1:9750",
    );
    check("127.0.0.1:9750", "unix:", "line 3: manager.listen = \"unix:\": must not be an empty path");
    check(
        "127.0.0.1:9750",
        "0.0.0.0:9750",
        "line 3: manager.listen = \"0.0.0.0:9750\": must be a loopback address or unix:/path, because there is no [tls]",
    );
    check(
        "store =",
        "metrics_listen = \"127.0.0.1:9750\"\nstore =",
        "line 4: manager.metrics_listen = \"127.0.0.1:9750\": must differ from manager.listen",
    );
    let tls = "[tls]\ncertificate = \"a\"\nkey = \"b\"\nclient_ca = \"c\"\nschedulers = [\"nova\"]";
    let config = parse(&format!("{}{tls}", RACK.replace("127.0.0.1", "0.0.0.0"))).unwrap();
    assert!(!config.manager.listen.is_local());
    assert_eq!(config.tls.unwrap().certificate, Path::new("/etc/tarn/a"));
    check(
        "[[host]]",
        "[tls]\nkey = 1\n\n[[host]]",
        "line 18: tls.certificate: is missing\nline 18: tls.client_ca: is missing\nline 19: tls.key = 1: must be a string in quotes",
    );
}

#[test]
fn times_and_fractions_outside_limits_are_rejected() {
    let section = |text: &str| format!("{text}\n\n[[host]]");
    for value in ["0.1", "0", "-1", "3601", "nan", "inf", "\"ten\""] {
        let expected =
            format!("line 19: lease.ttl_s = {value}: must be a number of seconds from 0.2 to 3600");
        check("[[host]]", &section(&format!("[lease]\nttl_s = {value}")), &expected);
    }
    check(
        "[[host]]",
        &section("[lease]\nfence_after_s = \"nevre\""),
        "line 19: lease.fence_after_s = \"nevre\": must be a number of seconds from 0 to 2592000, or \"never\"",
    );
    check(
        "[[host]]",
        &section("[policy]\ncommit_within_s = 0"),
        "line 19: policy.commit_within_s = 0: must be a number of seconds from 0.001 to 86400",
    );
    for value in ["1.5", "-0.1", "nan", "\"half\""] {
        let expected = format!("line 19: policy.pool_share = {value}: must be a fraction from 0 to 1");
        check("[[host]]", &section(&format!("[policy]\npool_share = {value}")), &expected);
    }
}

#[test]
fn unknown_driver_is_rejected() {
    check(
        "emulated",
        "cxl",
        "line 9: emc[0].driver = \"cxl\": no such driver; must be one of emulated, shared-dax",
    );
}

#[test]
fn serial_is_required_only_for_drivers_without_revocation() {
    let shared = "driver = \"shared-dax\"\nserial = \"0x1a\"";
    let config = parse(&RACK.replacen("driver = \"emulated\"", shared, 1)).unwrap();
    assert_eq!(config.emcs[0].serial.as_deref(), Some("0x1a"));
    let driver = "driver = \"emulated\"";
    check(driver, "driver = \"shared-dax\"", "line 6: emc[0].serial: is missing");
    check(
        driver,
        &shared.replace("shared-dax", "emulated"),
        "line 10: emc[0].serial = \"0x1a\": not allowed with driver emulated, only with shared-dax",
    );
    for value in ["", "0x", "1a", "0x01", "0x1A", "0x0x1", "0x1 ", "0x11112222333344445"] {
        let expected = format!(
            "line 10: emc[0].serial = \"{value}\": must be 0x and 1 to 16 hexadecimal digits (0-9, a-f) without leading zeros, as in sysfs"
        );
        check(driver, &shared.replace("0x1a", value), &expected);
    }
    let error = parse(&RACK.replace(driver, shared)).unwrap_err().to_string();
    assert!(error.ends_with("emc[1].serial = \"0x1a\": is a duplicate: must be unique"), "{error}");
}

#[test]
fn fence_command_requires_host_placeholder_and_has_a_deadline() {
    let fence = |text: &str| parse(&format!("{RACK}\n[fence]\n{text}"));
    let stop = fence("command = [\"/sbin/off\", \"{host}\"]").unwrap().fence.unwrap();
    assert_eq!((stop.command, stop.within), (vec!["/sbin/off".to_owned(), "{host}".into()], Ns::secs(60)));
    let within = fence("command = [\"/sbin/off-{host}\"]\nwithin_s = 2.5").unwrap().fence.unwrap().within;
    assert_eq!(within, Ns::ms(2500));
    for (value, expected) in [
        ("", "line 24: fence.command: is missing"),
        ("command = []", "line 25: fence.command = []: must begin with a program"),
        ("command = \"off {host}\"", "line 25: fence.command = \"off {host}\": must be a list"),
        (
            "command = [\"off\"]",
            "line 25: fence.command = [\"off\"]: must have {host} in one of its arguments, which is replaced by the host's name",
        ),
        (
            "command = [\"{host}\"]\nwithin_s = 0",
            "line 26: fence.within_s = 0: must be a number of seconds from 0.1 to 3600",
        ),
    ] {
        let error = fence(value).expect_err(value).to_string();
        assert_eq!(error.replace("/etc/tarn/rack.toml: ", ""), expected);
    }
}

#[test]
fn all_violations_in_a_file_are_reported() {
    let text = RACK.replace("64", "0").replace("\"h0\"", "\"../h0\"").replace("store", "stroe");
    let text = format!("{text}[access]\ngroup = -1\nadmins = [\"0\"]\nusers = []\n");
    let ConfigError::Invalid { violations, .. } = parse(&text).unwrap_err() else { panic!("not Invalid") };
    let fields: Vec<&str> = violations.iter().map(|violation| violation.field.as_str()).collect();
    let expected = [
        "manager.store",
        "manager.stroe",
        "emc[0].slices",
        "emc[1].slices",
        "host[0].name",
        "access.group",
        "access.users",
    ];
    assert_eq!(fields, expected);
}

#[test]
fn invalid_toml_is_reported_with_its_line() {
    let error = error_of("store = \"store\"", "store = \"store");
    assert!(error.starts_with("line 4: invalid TOML: "), "{error}");
    let error = error_of("slices = 64", "slices = 64\nslices = 65");
    assert!(error.starts_with("line 9: invalid TOML: duplicate key"), "{error}");
}

#[test]
fn missing_file_is_reported_with_its_path() {
    let error = Config::load(Path::new("/nonexistent/rack.toml")).unwrap_err();
    assert_eq!(error.to_string(), "cannot read /nonexistent/rack.toml");
}

#[test]
fn reload_may_add_change_and_remove_emcs_and_hosts() {
    let old = rack();
    let mut new = old.clone();
    new.emcs.push(Emc { name: Name::new("emc2").unwrap(), path: "/emc2".into(), ..old.emcs[0].clone() });
    new.hosts[0].cores = 64;
    new.hosts[0].emcs.push(Name::new("emc2").unwrap());
    new.hosts.push(Host { name: Name::new("h1").unwrap(), ..old.hosts[0].clone() });
    new.lease.ttl = Ns::secs(1);
    new.fence = Some(FenceCommand { command: vec!["off-{host}".into()], within: Ns::secs(1) });
    assert_eq!(changed_immutable_settings(&old, &new), []);
    new.hosts[0].emcs.pop();
    assert_eq!(changed_immutable_settings(&new, &old), [], "the ledger decides on removals");
}

#[test]
fn reload_reports_immutable_changes() {
    let old = rack();
    let mut new = old.clone();
    new.manager.folder = "/elsewhere".into();
    new.emcs[0].slices = 128;
    new.emcs[0].serial = Some("0x1".into());
    new.hosts[0].emcs.pop();
    new.manager.metrics_listen = Some("127.0.0.1:9751".parse().unwrap());
    let changes: Vec<String> =
        changed_immutable_settings(&old, &new).iter().map(ToString::to_string).collect();
    assert_eq!(
        changes,
        [
            "manager.store = /elsewhere: was /etc/tarn/store: a change requires a restart of pool-manager",
            "manager.metrics_listen = 127.0.0.1:9751: was unset: a change requires a restart of pool-manager",
            "emc emc0: slices = 128: was 64: cannot change: drain the EMC, remove it, and add it under another name",
            "emc emc0: serial = 0x1: was unset: cannot change: drain the EMC, remove it, and add it under another name",
            "host h0: emcs = [emc0]: was [emc0, emc1]: cannot remove an EMC of a host: drain and remove the host, then add it again",
        ]
    );
}

#[test]
fn listen_defaults_to_the_unix_socket() {
    let config = parse(&RACK.replace("listen = \"127.0.0.1:9750\"\n", "")).unwrap();
    assert_eq!(config.manager.listen, Listen::Unix(DEFAULT_SOCKET_PATH.into()));
    assert_eq!(config.access, Access::default());
}

#[test]
fn access_section_accepts_user_names_and_numbers() {
    let unix = RACK.replace("127.0.0.1:9750", "unix:/run/manager.sock");
    let text = "\n[access]\ngroup = \"root\"\nschedulers = [\"1001\"]\nadmins = [\"root\", \"1002\"]\n";
    let access = parse(&format!("{unix}{text}")).unwrap().access;
    assert_eq!(access.group, Some(0));
    let roles = |uid| Role::ALL.map(|role| access.has_role(uid, role));
    assert_eq!((roles(1001), roles(1002), roles(1003)), ([true, false], [true, true], [false, false]));
    let error_of = |text: &str| {
        let error = parse(&format!("{unix}\n[access]\n{text}\n")).unwrap_err().to_string();
        error.replace("/etc/tarn/rack.toml: ", "")
    };
    assert!(error_of("group = \"0\"\nadmins = [\"no-such-user\"]").contains("no such user on this machine"));
    assert!(error_of("group = \"no-such-group\"").contains("no such group on this machine"));
    assert!(error_of("admins = [\"root\"]").contains("access.group: is missing"));
}

#[test]
fn user_and_group_ids_are_at_most_4294967294() {
    let parse_access = |lines: &str| {
        let unix = RACK.replace("127.0.0.1:9750", "unix:/run/manager.sock");
        parse(&format!("{unix}[access]\n{lines}\n")).map(|config| config.access)
    };
    let access = parse_access("group = \"4294967294\"\nadmins = [\"4294967294\"]").unwrap();
    assert_eq!((access.group, access.admins), (Some(u32::MAX - 1), BTreeSet::from([u32::MAX - 1])));
    for (lines, field) in [
        ("group = \"4294967295\"", "line 24: access.group"),
        ("group = \"0\"\nschedulers = [\"4294967295\"]", "line 25: access.schedulers[0]"),
        ("group = \"0\"\nadmins = [\"4294967295\"]", "line 25: access.admins[0]"),
    ] {
        let error = parse_access(lines).expect_err(lines).to_string();
        let expected = format!(
            "/etc/tarn/rack.toml: {field} = \"4294967295\": must be a name in quotes, or a number from 0 to 4294967294"
        );
        assert_eq!(error, expected);
    }
}

#[test]
fn user_and_group_ids_need_no_quotes() {
    let parse_access = |lines: &str| {
        let unix = RACK.replace("127.0.0.1:9750", "unix:/run/manager.sock");
        let access = parse(&format!("{unix}[access]\n{lines}\n")).map(|config| config.access);
        access.map_err(|error| error.to_string().replace("/etc/tarn/rack.toml: ", ""))
    };
    let access = parse_access("group = 1000\nschedulers = [1001, \"1002\"]\nadmins = [4294967294]").unwrap();
    assert_eq!(access.group, Some(1000));
    assert_eq!((access.schedulers, access.admins), ([1001, 1002].into(), [u32::MAX - 1].into()));
    for value in ["-1", "4294967295", "99999999999999999999", "\"-1\"", "\"99999999999999999999\""] {
        let range = "must be a name in quotes, or a number from 0 to 4294967294";
        let error = parse_access(&format!("group = {value}")).unwrap_err();
        assert_eq!(error, format!("line 24: access.group = {value}: {range}"));
        let error = parse_access(&format!("group = 0\nadmins = [{value}]")).unwrap_err();
        assert_eq!(error, format!("line 25: access.admins[0] = {value}: {range}"));
    }
    for value in ["1.5", "true", "[1]"] {
        let error = parse_access(&format!("group = {value}")).unwrap_err();
        let rule = "must be a name in quotes, or a number from 0 to 4294967294";
        assert_eq!(error, format!("line 24: access.group = {value}: {rule}"));
    }
}

#[test]
fn access_section_without_a_unix_socket_is_rejected() {
    let error = parse(&format!("{RACK}\n[access]\ngroup = \"0\"\n")).unwrap_err().to_string();
    assert!(
        error.contains("line 25: access.group = \"0\": requires manager.listen = \"unix:/path\""),
        "{error}"
    );
}

/// Returns the validation errors of [`RACK`] with additional lines at its end.
fn error_with(lines: &str) -> String {
    let error = parse(&format!("{RACK}{lines}")).expect_err(lines).to_string();
    error.replace("/etc/tarn/rack.toml: ", "")
}

#[test]
fn fence_after_shorter_than_the_lease_is_rejected() {
    for (lines, expected) in [
        (
            "ttl_s = 2\nfence_after_s = 1.9",
            "line 25: lease.fence_after_s = 1.9: must not be shorter than lease.ttl_s (2)",
        ),
        (
            "fence_after_s = 5",
            "line 24: lease.fence_after_s = 5: must not be shorter than lease.ttl_s (default 10)",
        ),
        (
            "ttl_s = 700.5",
            "line 24: lease.ttl_s = 700.5: must not be longer than lease.fence_after_s (default 600)",
        ),
    ] {
        assert_eq!(error_with(&format!("[lease]\n{lines}\n")), expected);
    }
    for after in ["2", "\"never\""] {
        parse(&format!("{RACK}[lease]\nttl_s = 2\nfence_after_s = {after}\n")).unwrap();
    }
}

#[test]
fn violations_in_a_section_do_not_hide_unknown_keys() {
    assert_eq!(
        error_with("[lease]\nttl_s = 0\nttl = 1\n"),
        "line 24: lease.ttl_s = 0: must be a number of seconds from 0.2 to 3600\n\
         line 25: lease.ttl: unknown key; must be one of ttl_s, fence_after_s"
    );
    let access = error_with("[access]\ngroup = \"0\"\nadmins = [\"0\"]\nusers = []\n");
    for part in ["line 24: access.group = \"0\": requires", "line 25: access.admins = [\"0\"]: requires"] {
        assert!(access.contains(part), "{access}");
    }
    assert!(access.ends_with("line 26: access.users: unknown key; must be one of group, schedulers, admins"));
}

#[test]
fn nested_directories_are_rejected() {
    for (path, expected) in [
        ("/dev/shm/emc0/slices", "is inside emc[0].path (/dev/shm/emc0)"),
        ("/dev/shm/x/../emc0/slices", "is inside emc[0].path (/dev/shm/emc0)"),
        ("/dev/shm", "contains emc[0].path (/dev/shm/emc0)"),
        ("store/emc1", "is inside manager.store (/etc/tarn/store)"),
        (".", "contains manager.store (/etc/tarn/store)"),
    ] {
        let expected = format!("line 16: emc[1].path = {path:?}: {expected}: must be separate directories");
        check("path = \"emc1\"", &format!("path = {path:?}"), &expected);
    }
    for path in ["/dev/shm/emc01", "/dev/shm/emc0/../emc1"] {
        parse(&RACK.replace("path = \"emc1\"", &format!("path = {path:?}"))).unwrap();
    }
}

#[test]
fn unix_socket_path_longer_than_107_bytes_is_rejected() {
    let listen = |path: &str| RACK.replace("127.0.0.1:9750", &format!("unix:{path}"));
    let longest = format!("/{}", "x".repeat(106));
    parse(&listen(&longest)).unwrap();
    let error = parse(&listen(&format!("{longest}y"))).unwrap_err().to_string();
    assert!(error.starts_with("/etc/tarn/rack.toml: line 3: manager.listen = \"unix:/xxx"), "{error}");
    assert!(error.ends_with(": has a path of 108 bytes: must have at most 107 bytes"), "{error}");
    let relative = parse(&listen(&"x".repeat(99))).unwrap_err().to_string();
    assert!(relative.ends_with(": has a path of 109 bytes: must have at most 107 bytes"), "{relative}");
}

#[test]
fn path_with_nul_character_is_rejected() {
    check(
        "store = \"store\"",
        "store = \"a\\u0000b\"",
        "line 4: manager.store = \"a\\u0000b\": must not contain a NUL character",
    );
}

#[test]
fn file_in_another_encoding_is_rejected_with_its_line() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rack.toml");
    fs::write(&path, b"[manager]\n# caf\xe9\nstore = \"store\"\n").unwrap();
    let error = Config::load(&path).unwrap_err().to_string();
    assert_eq!(error, format!("{}: line 2: must be UTF-8, but contains the byte 0xe9", path.display()));
}

#[test]
fn token_folders_writable_by_others_are_rejected() {
    use std::os::unix::fs::PermissionsExt as _;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rack.toml");
    let config = Config::parse(RACK, &path).unwrap();
    let own = rustix::process::geteuid().as_raw();
    config.check_store_folders(&path, own).unwrap();
    for name in ["tokens", "roles"] {
        let tokens = config.manager.folder.join(name);
        fs::create_dir_all(&tokens).unwrap();
        fs::set_permissions(&tokens, fs::Permissions::from_mode(0o777)).unwrap();
        let expected = format!(
            "manager.store = {0}: has mode 0777: must not be writable by group or others; run `chmod go-w {0}`",
            tokens.display()
        );
        let error = config.check_store_folders(&path, own).unwrap_err().to_string();
        assert!(error.ends_with(&expected), "{error}");
        fs::set_permissions(&tokens, fs::Permissions::from_mode(0o700)).unwrap();
    }
}

/// Returns the violations that the checks of [`RACK`] report after a replacement.
fn unusable_folders(part: &str, replacement: &str) -> String {
    assert!(RACK.contains(part), "{part:?} is not in the rack");
    let own = rustix::process::geteuid().as_raw();
    let config = parse(&RACK.replacen(part, replacement, 1)).unwrap();
    let path = Path::new("/etc/tarn/rack.toml");
    let error =
        config.check_usable(path, own).and_then(|()| config.check_folders(path, own)).expect_err(replacement);
    error.to_string().replace("/etc/tarn/rack.toml: ", "")
}

#[test]
fn folder_on_a_kernel_file_system_is_rejected_with_its_field() {
    for (part, replacement, field) in [
        ("store = \"store\"", "store = \"/proc/tarn/x\"", "manager.store = /proc/tarn/x: "),
        ("path = \"emc1\"", "path = \"/sys/tarn/x\"", "emc[1].path = /sys/tarn/x: "),
        ("127.0.0.1:9750", "unix:/proc/tarn/x", "manager.listen = /proc/tarn/x: "),
    ] {
        let error = unusable_folders(part, replacement);
        assert!(error.starts_with(&format!("{field}is on a file system of type ")), "{error}");
    }
    assert!(
        unusable_folders("\"store\"", "\"/dev/null/store\"")
            .contains("is below /dev/null, which is not a folder")
    );
}

#[test]
fn long_path_component_is_rejected() {
    let error = error_of("\"store\"", &format!("\"{}/store\"", "x".repeat(300)));
    assert!(error.starts_with("line 4: manager.store = \"xxx"), "{error}");
    assert!(error.ends_with(": has a component of 300 bytes: each must have at most 255 bytes"), "{error}");
    parse(&RACK.replacen("\"store\"", &format!("\"{}\"", "x".repeat(255)), 1)).unwrap();
}

#[test]
fn socket_folder_of_another_user_is_rejected() {
    let own = rustix::process::geteuid().as_raw();
    if own != 0 {
        return; // only root can change an owner
    }
    let folder = tempfile::tempdir().unwrap();
    std::os::unix::fs::chown(folder.path(), Some(65534), None).unwrap();
    let socket = folder.path().join("manager.sock");
    let config = parse(&RACK.replace("127.0.0.1:9750", &format!("unix:{}", socket.display()))).unwrap();
    let rule = format!("the folder {} belongs to user 65534: must belong to root", folder.path().display());
    let path = Path::new("/etc/tarn/rack.toml");
    for error in [config.check_folders(path, own), config.check_store_folders(path, own)] {
        let error = error.unwrap_err().to_string();
        assert!(error.contains(&format!("manager.listen = {}: {rule}", socket.display())), "{error}");
    }
    config.check_folders(path, 65534).unwrap();
}

/// Configuration of a rack whose store is in etcd, with further lines of section `[etcd]`.
fn etcd_rack(store: &str, etcd: &str) -> String {
    let manager = format!("store = {store:?}\nstate_dir = \"state\"");
    let text = RACK.replace("store = \"store\"", &manager);
    format!("{text}\n[etcd]\nname = \"a\"\n{etcd}\n")
}

#[test]
fn store_in_etcd_is_parsed() {
    let config = parse(&etcd_rack("etcd://127.0.0.1:2379,[::1]:3379", "")).unwrap();
    assert_eq!(config.manager.folder, Path::new("/etc/tarn/state"));
    assert_eq!(config.manager.store(), "etcd://127.0.0.1:2379,[::1]:3379/tarn");
    let etcd = config.manager.etcd.unwrap();
    assert_eq!(etcd.endpoints(), ["http://127.0.0.1:2379", "http://[::1]:3379"]);
    assert_eq!((etcd.name.as_str(), etcd.advertise.as_str()), ("a", "http://127.0.0.1:9750"));
    assert_eq!((etcd.lease, etcd.quota), (Ns::secs(5), Bytes::gib(2)));
    let settings = "ca = \"ca.pem\"\ncertificate = \"a.pem\"\nkey = \"a.key\"\nuser = \"tarn\"\npassword_file = \"password\"\nlease_s = 2\nadvertise = \"http://m:1\"";
    let etcd = parse(&etcd_rack("etcd://e1:2379/racks/r1", settings)).unwrap().manager.etcd.unwrap();
    assert_eq!(
        (etcd.endpoints(), etcd.location.prefix.as_str()),
        (vec!["https://e1:2379".to_owned()], "/racks/r1")
    );
    let identity = Some(("/etc/tarn/a.pem".into(), "/etc/tarn/a.key".into()));
    assert_eq!(etcd.tls, Some(EtcdTls { ca: "/etc/tarn/ca.pem".into(), identity }));
    assert_eq!(etcd.user, Some(EtcdUser { name: "tarn".into(), password_file: "/etc/tarn/password".into() }));
    assert_eq!((etcd.lease, etcd.advertise.as_str()), (Ns::secs(2), "http://m:1"));
}

#[test]
fn invalid_locations_in_etcd_are_rejected() {
    let long = format!("etcd://[::1]:1/{}", "x".repeat(200));
    let many = format!("etcd://{}", ["[::1]:1"; 10].join(","));
    let cases = [
        ("etcds://127.0.0.1:1", "must be a folder or etcd://HOST:PORT,HOST:PORT/PREFIX"),
        ("ETCD:/127.0.0.1:1", "must be a folder or etcd://HOST:PORT,HOST:PORT/PREFIX"),
        ("etcd://", "must be etcd://HOST:PORT,HOST:PORT/PREFIX"),
        ("etcd:///tarn", "must be etcd://HOST:PORT,HOST:PORT/PREFIX"),
        ("etcd://127.0.0.1", "member \"127.0.0.1\" must have a port from 1 to 65535"),
        ("etcd://127.0.0.1:0", "member \"127.0.0.1:0\" must have a port from 1 to 65535"),
        ("etcd://127.0.0.1:1,", "must be etcd://HOST:PORT,HOST:PORT/PREFIX"),
        ("etcd://127.0.0.1:1,127.0.0.1:1", "127.0.0.1:1 is a duplicate: must be unique"),
        ("etcd://u:p@127.0.0.1:1", "must not contain a user name or a password"),
        ("etcd://10.0.0.1:1", "member \"10.0.0.1:1\" must be on this machine, because there is no etcd.ca"),
        ("etcd://[::1]:1/", "prefix \"/\" must consist of names with a slash before each"),
        ("etcd://[::1]:1/a//b", "prefix \"/a//b\" must consist of names"),
        ("etcd://[::1]:1/a b", "must "),
        (&long, "at most 200 bytes"),
        (&many, "has 10 members: must have at most 9"),
    ];
    for (store, rule) in cases {
        let error = parse(&etcd_rack(store, "")).unwrap_err().to_string();
        assert!(error.contains("manager.store = ") && error.contains(rule), "{store}: {error}");
    }
}

#[test]
fn invalid_settings_of_etcd_are_rejected() {
    let cases = [
        ("lease_s = 1", "etcd.lease_s = 1: must be "),
        ("lease_s = 61", "etcd.lease_s = 61: must be "),
        ("quota_mib = 1", "etcd.quota_mib = 1: must be "),
        ("certificate = \"a.pem\"", "etcd.certificate = \"a.pem\": requires key"),
        ("certificate = \"a.pem\"\nkey = \"a.key\"", "etcd.ca: is missing: certificate and key require it"),
        ("user = \"tarn\"", "etcd.user = \"tarn\": requires password_file"),
        ("user = \"\"\npassword_file = \"p\"", "etcd.user = \"\": must not be empty"),
        ("advertise = \"https://a:1\"", "must be http://HOST:PORT or unix:/PATH, because there is no [tls]"),
        ("advertise = \"http://a\"", "must be http://HOST:PORT"),
        ("advertise = \"http://a:1/x\"", "must be http://HOST:PORT"),
        ("nme = \"b\"", "etcd.nme: unknown key; must be one of "),
    ];
    for (settings, expected) in cases {
        let error = parse(&etcd_rack("etcd://[::1]:1", settings)).unwrap_err().to_string();
        assert!(error.contains(expected), "{settings}: {error}");
    }
}

#[test]
fn settings_of_etcd_require_a_store_in_etcd() {
    let error = parse(&format!("{RACK}\n[etcd]\nname = \"a\"\n")).unwrap_err().to_string();
    assert!(
        error.contains("etcd") && error.contains("requires manager.store = \"etcd://HOST:PORT\""),
        "{error}"
    );
    let error = error_of("store = \"store\"", "store = \"store\"\nstate_dir = \"state\"");
    assert!(error.contains("manager.state_dir = \"state\": requires manager.store = "), "{error}");
    let error = error_of("store = \"store\"", "store = \"etcd://[::1]:1\"\nstate_dir = \"state\"");
    assert!(error.contains("etcd: is missing: manager.store requires it"), "{error}");
    let error = error_of("store = \"store\"", "store = \"etcd://[::1]:1\"");
    assert!(error.contains("manager.state_dir: is missing"), "{error}");
}

#[test]
fn reload_rejects_changes_of_etcd() {
    let old = parse(&etcd_rack("etcd://[::1]:1", "")).unwrap();
    let new = parse(&etcd_rack("etcd://[::1]:1,[::1]:2", "lease_s = 9")).unwrap();
    let changes = changed_immutable_settings(&old, &new);
    let fields: Vec<_> = changes.iter().map(|change| change.field.as_str()).collect();
    assert_eq!(fields, ["manager.store", "etcd.lease_s"]);
}
