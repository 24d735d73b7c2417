//! Downloads Debian packages with private package lists and unpacks them into a folder. No package
//! is installed on this machine, and root is not required.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use crate::{failure::Failure, step::run_step};

/// Instance of apt with private package lists, cache and status in a folder.
#[derive(Debug)]
pub struct Apt {
    dir: PathBuf,
}

impl Apt {
    /// Configures apt in a folder, and downloads the package lists of these Debian suites.
    ///
    /// # Errors
    /// Returns an error if apt-get is missing or the mirror cannot be reached.
    pub fn prepare(dir: &Path, suites: &[&str]) -> Result<Self, Failure> {
        for folder in ["lists/partial", "cache/archives/partial"] {
            fs::create_dir_all(dir.join(folder)).map_err(Failure::file_error("create", dir))?;
        }
        let mirror = find_mirror()?;
        let source = |suite: &&str| {
            let key = "signed-by=/usr/share/keyrings/debian-archive-keyring.gpg";
            format!("deb [{key}] {mirror} {suite} main\n")
        };
        let apt_dir = dir.display();
        let settings = format!(
            "Dir::Etc::sourcelist \"{apt_dir}/sources.list\";\nDir::Etc::sourceparts \"-\";\n\
             Dir::State::lists \"{apt_dir}/lists\";\nDir::State::status \"{apt_dir}/status\";\n\
             Dir::Cache \"{apt_dir}/cache\";\nAPT::Install-Recommends \"false\";\nAPT::Sandbox::User \"root\";\n"
        );
        let sources: String = suites.iter().map(source).collect();
        for (name, content) in [("sources.list", sources), ("status", String::new()), ("apt.conf", settings)]
        {
            fs::write(dir.join(name), content).map_err(Failure::file_error("write", dir.join(name)))?;
        }
        let apt = Self { dir: dir.to_owned() };
        run_step("download Debian package lists", apt.command("apt-get").args(["--quiet", "update"]))?;
        Ok(apt)
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.env("APT_CONFIG", self.dir.join("apt.conf"));
        command
    }

    /// Returns the first dependency of a package. For a kernel metapackage, this is the newest
    /// kernel.
    ///
    /// # Errors
    /// Returns an error if the package has no dependency.
    pub fn first_dependency(&self, suite: &str, package: &str) -> Result<String, Failure> {
        let mut command = self.command("apt-cache");
        let output = capture_output(command.args(["--target-release", suite, "depends", package]))?;
        let first = output.lines().find_map(|line| line.trim().strip_prefix("Depends: "));
        first.map(str::to_owned).ok_or_else(|| Failure::UnexpectedOutput {
            program: "apt-cache".to_owned(),
            reason: format!("package {package} of suite {suite} has no dependency: {output:?}"),
        })
    }

    /// Downloads packages and unpacks them into a folder.
    ///
    /// # Errors
    /// Returns an error if a package does not exist or cannot be downloaded.
    pub fn unpack_packages(&self, suite: &str, packages: &[&str], into: &Path) -> Result<(), Failure> {
        let cache = self.create_empty_cache()?;
        let mut download = self.command("apt-get");
        download.args(["--quiet", "--target-release", suite, "download"]).args(packages).current_dir(&cache);
        run_step(&format!("download {}", packages.join(", ")), &mut download)?;
        unpack_all(&cache, into)
    }

    /// Downloads a package with its dependencies and unpacks them into a folder.
    ///
    /// # Errors
    /// Returns an error if a package does not exist or cannot be downloaded.
    pub fn unpack_with_dependencies(&self, suite: &str, package: &str, into: &Path) -> Result<(), Failure> {
        let cache = self.create_empty_cache()?;
        let mut install = self.command("apt-get");
        install.args(["--quiet=2", "--yes", "--download-only", "--target-release", suite]).arg("-o");
        install.arg(format!("Dir::Cache::archives={}", cache.display())).args(["install", package]);
        run_step(&format!("download {package} and its dependencies"), &mut install)?;
        unpack_all(&cache, into)
    }

    fn create_empty_cache(&self) -> Result<PathBuf, Failure> {
        let cache = self.dir.join("fetched");
        let _ = fs::remove_dir_all(&cache); // the folder may not exist
        fs::create_dir_all(cache.join("partial")).map_err(Failure::file_error("create", &cache))?;
        Ok(cache)
    }
}

fn unpack_all(cache: &Path, into: &Path) -> Result<(), Failure> {
    fs::create_dir_all(into).map_err(Failure::file_error("create", into))?;
    for entry in fs::read_dir(cache).map_err(Failure::file_error("read", cache))?.filter_map(Result::ok) {
        let archive = entry.path();
        if archive.extension().is_some_and(|extension| extension == "deb") {
            capture_output(Command::new("dpkg-deb").arg("--extract").arg(&archive).arg(into))?;
        }
    }
    fs::remove_dir_all(cache).map_err(Failure::file_error("remove", cache))
}

/// Returns the URI of the Debian mirror from the apt configuration of this machine. Also works if
/// this machine has no package lists.
fn find_mirror() -> Result<String, Failure> {
    let mut command = Command::new("apt-get");
    let targets =
        capture_output(command.args(["indextargets", "--no-release-info", "--format", "$(REPO_URI)"]))?;
    find_debian_uri(&targets).map(str::to_owned).ok_or_else(|| Failure::UnexpectedOutput {
        program: "apt-get".to_owned(),
        reason: format!("no Debian mirror is configured: {targets:?}"),
    })
}

/// Returns the URI of the Debian mirror among all package sources of a machine. Other sources may
/// have suites with the same names.
fn find_debian_uri(targets: &str) -> Option<&str> {
    targets.lines().find(|uri| uri.trim_end_matches('/').ends_with("/debian"))
}

/// Runs a program and returns its stdout.
///
/// # Errors
/// Returns an error if the program does not start or exits with a failure.
pub fn capture_output(command: &mut Command) -> Result<String, Failure> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.output().map_err(Failure::start_error(&program))?;
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        false => Err(Failure::UnexpectedOutput {
            program,
            reason: String::from_utf8_lossy(&output.stderr).into_owned(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debian_source_is_found_among_other_sources() {
        let targets = "http://a.example/cli/\nhttp://b.example/debian-security/\nhttp://b.example/debian/\n";
        assert_eq!(find_debian_uri(targets), Some("http://b.example/debian/"));
        assert_eq!(find_debian_uri("http://a.example/ubuntu/\n"), None);
    }
}
