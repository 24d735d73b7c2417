//! The demo's rack.toml: its own, or a given one with addresses and paths replaced. Other keys are
//! unchanged; the manager interprets them.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use toml::{Table, Value};

use super::{scratch::Scratch, write};
use crate::failure::Failure;

/// The rack unless another is given: little memory for its cores, as in a rack that counts on its pool, and leases that end
/// while one watches. Traces of public clouds and the generator's fill it and its pool.
const OWN: &str = r#"
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

/// Default settings of the manager.
const TTL_DEFAULT: Duration = Duration::from_secs(10);
const FENCE_AFTER_DEFAULT: Duration = Duration::from_secs(600);

/// A rack without a place.
#[derive(Debug)]
pub struct Plan {
    table: Table,
}

/// A rack with a place.
#[derive(Debug)]
pub struct Rack {
    /// Its rack.toml.
    pub file: PathBuf,
    /// Names of its hosts.
    pub hosts: Vec<String>,
    /// After so much silence a host is unknown.
    pub ttl: Duration,
    /// After so much silence a host is fenced.
    pub fence_after: Option<Duration>,
    slices: Vec<i64>,
    listen: String,
}

impl Plan {
    /// The rack of this file, or the demo's own.
    ///
    /// # Errors
    /// The file cannot be read, or is not TOML.
    pub fn read(file: Option<&Path>) -> Result<Self, Failure> {
        let text = match file {
            Some(file) => fs::read_to_string(file).map_err(Failure::file("read", file))?,
            None => OWN.to_owned(),
        };
        Self::of(&text, &file.unwrap_or(Path::new("the demo's rack")).display().to_string())
    }

    /// The rack that a text describes.
    ///
    /// # Errors
    /// It is not TOML.
    pub fn of(text: &str, name: &str) -> Result<Self, Failure> {
        let wrong = |wrong| Failure::Answer { program: name.to_owned(), why: format!("{wrong}") };
        Ok(Self { table: text.parse().map_err(wrong)? })
    }

    /// Gives it a store, devices and a socket, and writes it down.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn placed(mut self, scratch: &Scratch) -> Result<Rack, Failure> {
        let listen = format!("unix:{}", scratch.disk().join("manager.sock").display());
        self.place(&listen, scratch.disk(), scratch.memory());
        let file = scratch.file("rack.toml");
        write(&file, &self.table.to_string())?;
        let lease = self.table.get("lease").and_then(Value::as_table);
        let span = |key| lease.and_then(|lease| lease.get(key)).map(seconds);
        Ok(Rack {
            hosts: self
                .named("host")
                .iter()
                .filter_map(|host| Some(text(host, "name")?.to_owned()))
                .collect(),
            slices: self.named("emc").iter().filter_map(|emc| emc.get("slices")?.as_integer()).collect(),
            ttl: span("ttl_s").flatten().unwrap_or(TTL_DEFAULT),
            fence_after: span("fence_after_s").unwrap_or(Some(FENCE_AFTER_DEFAULT)),
            file,
            listen,
        })
    }

    /// Only addresses, paths and identities are the demo's; all else is as it was written.
    fn place(&mut self, listen: &str, disk: &Path, memory: &Path) {
        self.table.remove("tls");
        self.table.remove("access");
        let manager = self.table.entry("manager").or_insert_with(|| Value::Table(Table::new()));
        if let Some(manager) = manager.as_table_mut() {
            manager.remove("metrics_listen");
            manager.insert("listen".to_owned(), listen.into());
            manager.insert("store".to_owned(), path(&disk.join("store")));
        }
        for emc in self.named_mut("emc") {
            let own = memory.join(text(emc, "name").unwrap_or("emc"));
            emc.insert("driver".to_owned(), "emulated".into());
            emc.insert("path".to_owned(), path(&own));
        }
        self.named_mut("host").for_each(|host| drop(host.remove("token_sha256")));
    }

    fn named(&self, kind: &str) -> Vec<&Table> {
        self.table
            .get(kind)
            .and_then(Value::as_array)
            .into_iter()
            .flatten()
            .filter_map(Value::as_table)
            .collect()
    }

    fn named_mut(&mut self, kind: &str) -> impl Iterator<Item = &mut Table> {
        let all = self.table.get_mut(kind).and_then(Value::as_array_mut);
        all.into_iter().flatten().filter_map(Value::as_table_mut)
    }
}

impl Rack {
    /// Where its manager answers.
    pub fn uri(&self) -> String {
        self.listen.clone()
    }

    /// How big it is.
    pub fn summary(&self) -> String {
        let slices: i64 = self.slices.iter().sum();
        format!("{} hosts, {slices} slices of 1 GiB on {} EMCs", self.hosts.len(), self.slices.len())
    }
}

fn text<'a>(table: &'a Table, key: &str) -> Option<&'a str> {
    table.get(key).and_then(Value::as_str)
}

fn path(path: &Path) -> Value {
    Value::String(path.display().to_string())
}

/// A number of seconds; `None` for a word, which is "never".
fn seconds(value: &Value) -> Option<Duration> {
    let whole = value.as_integer().and_then(|whole| u64::try_from(whole).ok()).map(Duration::from_secs);
    whole.or_else(|| Duration::try_from_secs_f64(value.as_float()?).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn placed(toml: &str) -> Table {
        let mut plan = Plan { table: toml.parse().unwrap() };
        plan.place("127.0.0.1:1", Path::new("/d"), Path::new("/m"));
        plan.table
    }

    #[test]
    fn a_rack_keeps_everything_but_its_place() {
        let given = "[manager]\nlisten = \"10.0.0.1:1\"\nstore = \"/x\"\nmetrics_listen = \"10.0.0.1:2\"\n\
                     [tls]\nkey = \"k\"\n[policy]\npool_share = 0.5\n\
                     [[emc]]\nname = \"e\"\nslices = 7\ndriver = \"shared-dax\"\npath = \"/dev/dax0.0\"\n\
                     [[host]]\nname = \"h\"\ncores = 3\ntoken_sha256 = \"aa\"\n";
        let expected = "[manager]\nlisten = \"127.0.0.1:1\"\nstore = \"/d/store\"\n[policy]\npool_share = 0.5\n\
                        [[emc]]\nname = \"e\"\nslices = 7\ndriver = \"emulated\"\npath = \"/m/e\"\n\
                        [[host]]\nname = \"h\"\ncores = 3\n";
        assert_eq!(placed(given), expected.parse::<Table>().unwrap());
    }

    #[test]
    fn a_rack_without_a_manager_gets_one() {
        assert_eq!(placed("")["manager"]["listen"].as_str(), Some("127.0.0.1:1"));
    }

    #[test]
    fn never_is_no_time() {
        assert_eq!(seconds(&Value::from("never")), None);
        assert_eq!(seconds(&Value::from(2)), Some(Duration::from_secs(2)));
        assert_eq!(seconds(&Value::from(0.5)), Some(Duration::from_millis(500)));
    }

    #[test]
    fn the_demo_has_a_rack_of_its_own() {
        let own = placed(OWN);
        assert_eq!(own["host"].as_array().unwrap().len(), 4);
        assert_eq!(own["emc"].as_array().unwrap().len(), 2);
    }
}
