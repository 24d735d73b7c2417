//! Paths of the files with the tokens of hosts and roles, in the directory of the store.

use std::path::{Path, PathBuf};

use units::Name;

use crate::role::Role;

/// Returns the directory of the hosts' tokens. `store` is the directory of the store.
pub fn host_token_directory(store: &Path) -> PathBuf {
    store.join("tokens")
}

/// Returns the path of the file with a host's token.
pub fn host_token_path(store: &Path, host: &Name) -> PathBuf {
    host_token_directory(store).join(format!("{host}.token"))
}

/// Returns the directory of the roles' tokens. `store` is the directory of the store.
pub fn role_token_directory(store: &Path) -> PathBuf {
    store.join("roles")
}

/// Returns the path of the file with a role's token.
pub fn role_token_path(store: &Path, role: Role) -> PathBuf {
    role_token_directory(store).join(format!("{role}.token"))
}
