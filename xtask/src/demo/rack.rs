//! rack.toml of the demo: a default configuration, or a given file with replaced addresses and
//! paths. Other keys are not changed.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use toml::{Table, Value};

use super::{scratch::ScratchFolders, write_file};
use crate::failure::Failure;

/// Default rack.toml. Hosts have little local memory per core, so that traces of VMs fill both the
/// local memory and the pool. Leases are short, so that the demo does not wait long.
const DEFAULT_RACK: &str = r#"
[lease]
ttl_s = 1
fence_after_s = 2

[[emc]]
name = "emc0"
slices = 160
[[emc]]
name = "emc1"
slices = 160

[[host]]
name = "h0"
cores = 160
local_mib = 196608
emcs = ["emc0"]
[[host]]
name = "h1"
cores = 160
local_mib = 196608
emcs = ["emc0", "emc1"]
[[host]]
name = "h2"
cores = 160
local_mib = 196608
emcs = ["emc0", "emc1"]
[[host]]
name = "h3"
cores = 160
local_mib = 196608
emcs = ["emc1"]
"#;

/// Default lease duration of the manager, if rack.toml has no `ttl_s`.
const LEASE_TTL_DEFAULT: Duration = Duration::from_secs(10);
/// Default fencing delay of the manager, if rack.toml has no `fence_after_s`.
const FENCE_AFTER_DEFAULT: Duration = Duration::from_secs(600);

/// Configuration of a rack, before its paths are set.
#[derive(Debug)]
pub struct DemoPlan {
    table: Table,
}

/// Rack whose configuration has been written to a file.
#[derive(Debug)]
pub struct Rack {
    /// Path of rack.toml.
    pub file: PathBuf,
    /// Names of the hosts.
    pub hosts: Vec<String>,
    /// Duration of a host lease.
    pub lease_ttl: Duration,
    /// Time from the expiry of a lease until the host is fenced, or `None` if hosts are not fenced.
    pub fence_after: Option<Duration>,
    slices: Vec<i64>,
    listen: String,
}

impl DemoPlan {
    /// Reads the configuration from a file, or returns the default configuration for `None`.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read or is not TOML.
    pub fn read(file: Option<&Path>) -> Result<Self, Failure> {
        let text = match file {
            Some(file) => fs::read_to_string(file).map_err(Failure::file_error("read", file))?,
            None => DEFAULT_RACK.to_owned(),
        };
        Self::parse(&text, &file.unwrap_or(Path::new("the demo's rack")).display().to_string())
    }

    /// Parses a configuration. `name` is used in error messages.
    ///
    /// # Errors
    /// Returns an error if the text is not TOML.
    pub fn parse(text: &str, name: &str) -> Result<Self, Failure> {
        let failure =
            |error| Failure::UnexpectedOutput { program: name.to_owned(), reason: format!("{error}") };
        Ok(Self { table: text.parse().map_err(failure)? })
    }

    /// Sets the paths of the store, the devices and the socket, and writes rack.toml.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    pub fn deploy(mut self, scratch: &ScratchFolders) -> Result<Rack, Failure> {
        let listen = format!("unix:{}", scratch.disk_dir().join("manager.sock").display());
        self.set_paths(&listen, scratch.disk_dir(), scratch.memory_dir());
        let file = scratch.file("rack.toml");
        write_file(&file, &self.table.to_string())?;
        let lease = self.table.get("lease").and_then(Value::as_table);
        let duration = |key| lease.and_then(|lease| lease.get(key)).map(parse_seconds);
        Ok(Rack {
            hosts: self
                .tables("host")
                .iter()
                .filter_map(|host| Some(get_str(host, "name")?.to_owned()))
                .collect(),
            slices: self.tables("emc").iter().filter_map(|emc| emc.get("slices")?.as_integer()).collect(),
            lease_ttl: duration("ttl_s").flatten().unwrap_or(LEASE_TTL_DEFAULT),
            fence_after: duration("fence_after_s").unwrap_or(Some(FENCE_AFTER_DEFAULT)),
            file,
            listen,
        })
    }

    /// Replaces addresses, paths and identities. Other keys are not changed.
    fn set_paths(&mut self, listen: &str, disk: &Path, memory: &Path) {
        self.table.remove("tls");
        self.table.remove("access");
        let manager = self.table.entry("manager").or_insert_with(|| Value::Table(Table::new()));
        if let Some(manager) = manager.as_table_mut() {
            manager.remove("metrics_listen");
            manager.insert("listen".to_owned(), listen.into());
            manager.insert("store".to_owned(), path_value(&disk.join("store")));
        }
        for emc in self.tables_mut("emc") {
            let emc_path = memory.join(get_str(emc, "name").unwrap_or("emc"));
            emc.insert("driver".to_owned(), "emulated".into());
            emc.insert("path".to_owned(), path_value(&emc_path));
        }
        self.tables_mut("host").for_each(|host| drop(host.remove("token_sha256")));
    }

    fn tables(&self, kind: &str) -> Vec<&Table> {
        self.table
            .get(kind)
            .and_then(Value::as_array)
            .into_iter()
            .flatten()
            .filter_map(Value::as_table)
            .collect()
    }

    fn tables_mut(&mut self, kind: &str) -> impl Iterator<Item = &mut Table> {
        let all = self.table.get_mut(kind).and_then(Value::as_array_mut);
        all.into_iter().flatten().filter_map(Value::as_table_mut)
    }
}

impl Rack {
    /// Returns the endpoint of the manager as a URI.
    pub fn uri(&self) -> String {
        self.listen.clone()
    }

    /// Returns a description of the size of the rack.
    pub fn summary(&self) -> String {
        let slices: i64 = self.slices.iter().sum();
        format!("{} hosts, {slices} slices of 1 GiB on {} EMCs", self.hosts.len(), self.slices.len())
    }
}

fn get_str<'a>(table: &'a Table, key: &str) -> Option<&'a str> {
    table.get(key).and_then(Value::as_str)
}

fn path_value(path: &Path) -> Value {
    Value::String(path.display().to_string())
}

/// Parses a number of seconds. Returns `None` for other values, such as "never".
fn parse_seconds(value: &Value) -> Option<Duration> {
    let whole = value.as_integer().and_then(|whole| u64::try_from(whole).ok()).map(Duration::from_secs);
    whole.or_else(|| Duration::try_from_secs_f64(value.as_float()?).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn deploy(toml: &str) -> Table {
        let mut plan = DemoPlan { table: toml.parse().unwrap() };
        plan.set_paths("127.0.0.1:1", Path::new("/d"), Path::new("/m"));
        plan.table
    }

    #[test]
    fn only_addresses_paths_and_identities_are_replaced() {
        let input = "[manager]\nlisten = \"10.0.0.1:1\"\nstore = \"/x\"\nmetrics_listen = \"10.0.0.1:2\"\n\
                     [tls]\nkey = \"k\"\n[policy]\npool_share = 0.5\n\
                     [[emc]]\nname = \"e\"\nslices = 7\ndriver = \"shared-dax\"\npath = \"/dev/dax0.0\"\n\
                     [[host]]\nname = \"h\"\ncores = 3\ntoken_sha256 = \"aa\"\n";
        let expected = "[manager]\nlisten = \"127.0.0.1:1\"\nstore = \"/d/store\"\n[policy]\npool_share = 0.5\n\
                        [[emc]]\nname = \"e\"\nslices = 7\ndriver = \"emulated\"\npath = \"/m/e\"\n\
                        [[host]]\nname = \"h\"\ncores = 3\n";
        assert_eq!(deploy(input), expected.parse::<Table>().unwrap());
    }

    #[test]
    fn missing_manager_section_is_added() {
        assert_eq!(deploy("")["manager"]["listen"].as_str(), Some("127.0.0.1:1"));
    }

    #[test]
    fn never_is_parsed_as_none() {
        assert_eq!(parse_seconds(&Value::from("never")), None);
        assert_eq!(parse_seconds(&Value::from(2)), Some(Duration::from_secs(2)));
        assert_eq!(parse_seconds(&Value::from(0.5)), Some(Duration::from_millis(500)));
    }

    #[test]
    fn default_rack_has_four_hosts_and_two_emcs() {
        let emc_path = deploy(DEFAULT_RACK);
        assert_eq!(emc_path["host"].as_array().unwrap().len(), 4);
        assert_eq!(emc_path["emc"].as_array().unwrap().len(), 2);
    }
}
