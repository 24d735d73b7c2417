//! Runs commands of `tarn` on the rack, like an operator. Queries use the JSON output, which is a
//! stable interface.

use std::{path::Path, process::Output};

use serde::{Deserialize, de::DeserializeOwned};

use super::{
    rack::Rack,
    service::{Programs, new_command},
};
use crate::failure::Failure;

/// Host in the output of `tarn get hosts`, with the fields that the demo uses.
#[derive(Clone, Debug, Deserialize)]
pub struct Host {
    /// Name of the host, such as `h0`.
    pub host: String,
    /// State of the host, in lower case.
    pub state: String,
    /// Number of slices of the host.
    pub slices: u32,
    /// Number of VM reservations on the host.
    pub reservations: u32,
}

#[derive(Clone, Debug, Deserialize)]
struct Slice {
    slice: u32,
    host: Option<String>,
}

#[derive(Clone, Debug, Deserialize)]
struct Emc {
    draining: u32,
}

/// Client of a rack, which runs the program `tarn`.
#[derive(Debug)]
pub struct TarnCli<'a> {
    tarn: &'a Path,
    uri: String,
}

impl<'a> TarnCli<'a> {
    /// Creates a client for this rack.
    pub fn new(programs: &'a Programs, rack: &Rack) -> Self {
        Self { tarn: &programs.tarn, uri: rack.uri() }
    }

    /// Returns whether the manager replies to requests.
    ///
    /// # Errors
    /// Returns an error if `tarn` does not start.
    pub fn is_manager_ready(&self) -> Result<bool, Failure> {
        Ok(self.run(&["get", "rack"])?.status.success())
    }

    /// Returns all hosts of the rack.
    ///
    /// # Errors
    /// Returns an error if there is no reply or the reply cannot be parsed.
    pub fn hosts(&self) -> Result<Vec<Host>, Failure> {
        self.query_json(&["get", "hosts"])
    }

    /// Returns whether a host is in one of these states. Returns `false` if there is no reply.
    ///
    /// # Errors
    /// Returns an error if the reply cannot be parsed.
    pub fn has_state(&self, host: &str, states: &[&str]) -> Result<bool, Failure> {
        let hosts = self.hosts().or_else(|failure| match failure {
            Failure::Step { .. } => Ok(Vec::new()),
            other => Err(other),
        })?;
        Ok(hosts.iter().any(|candidate| candidate.host == host && states.contains(&candidate.state.as_str())))
    }

    /// Returns the ids of the slices of a host.
    ///
    /// # Errors
    /// Returns an error if there is no reply or the reply cannot be parsed.
    pub fn slices_of(&self, host: &str) -> Result<Vec<u32>, Failure> {
        let slices: Vec<Slice> = self.query_json(&["get", "slices"])?;
        let owned = slices.into_iter().filter(|slice| slice.host.as_deref() == Some(host));
        Ok(owned.map(|slice| slice.slice).collect())
    }

    /// Returns whether no slice of the rack is draining.
    ///
    /// # Errors
    /// Returns an error if there is no reply or the reply cannot be parsed.
    pub fn has_no_draining_slice(&self) -> Result<bool, Failure> {
        let emcs: Vec<Emc> = self.query_json(&["get", "emcs"])?;
        Ok(emcs.iter().all(|emc| emc.draining == 0))
    }

    /// Runs a command that changes the rack.
    ///
    /// # Errors
    /// Returns an error if the command fails.
    pub fn execute(&self, arguments: &[&str]) -> Result<(), Failure> {
        self.run_checked(arguments).map(drop)
    }

    /// Returns the output of `tarn get KIND` as a table.
    ///
    /// # Errors
    /// Returns an error if the command fails.
    pub fn get_table(&self, kind: &str) -> Result<String, Failure> {
        let output = self.run_checked(&["get", kind])?;
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    fn query_json<T: DeserializeOwned>(&self, arguments: &[&str]) -> Result<T, Failure> {
        let arguments = [arguments, &["--output", "json"]].concat();
        let output = self.run_checked(&arguments)?;
        serde_json::from_slice(&output.stdout).map_err(|error| Failure::UnexpectedOutput {
            program: format!("tarn {}", arguments.join(" ")),
            reason: error.to_string(),
        })
    }

    fn run_checked(&self, arguments: &[&str]) -> Result<Output, Failure> {
        let output = self.run(arguments)?;
        if output.status.success() {
            return Ok(output);
        }
        let stderr = String::from_utf8_lossy(&output.stderr);
        Err(Failure::Step {
            step: format!("tarn {}: {}", arguments.join(" "), stderr.trim()),
            status: output.status,
        })
    }

    fn run(&self, arguments: &[&str]) -> Result<Output, Failure> {
        new_command(self.tarn)
            .args(["--endpoint", &self.uri])
            .args(arguments)
            .output()
            .map_err(Failure::start_error("tarn"))
    }
}
