//! Section `[access]`: local users of the unix socket, in addition to root and the manager's user.

use std::collections::BTreeSet;

use nix::unistd::{Group, User};
use units::limits::ROLE_NAMES_MAX;

use crate::role::Role;
use config_file::{Field, Section};

/// Local users of the unix socket. Root and the manager's user have every role.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Access {
    /// ID of the group whose members may connect. `None` admits only root and the socket's owner.
    pub group: Option<u32>,
    /// IDs of users with the role scheduler.
    pub schedulers: BTreeSet<u32>,
    /// IDs of users with the role admin.
    pub admins: BTreeSet<u32>,
}

impl Access {
    /// Returns whether the user has the role; an admin has every role.
    pub fn has_role(&self, uid: u32, role: Role) -> bool {
        self.admins.contains(&uid) || role == Role::Scheduler && self.schedulers.contains(&uid)
    }
}

/// Maximum ID of a user or group. `chown` treats `u32::MAX` as a request to change nothing.
const ID_MAX: u32 = u32::MAX - 1;

/// Parses the section. `is_unix` states whether `manager.listen` is a unix socket; `None` if
/// `[manager]` is invalid. In this case, rules that depend on the socket are not checked.
pub(super) fn parse_access(mut section: Section<'_>, is_unix: Option<bool>) -> Option<Access> {
    let group = section.take_optional("group", parse_group);
    let schedulers = section.take_list("schedulers", ROLE_NAMES_MAX, parse_user);
    let admins = section.take_list("admins", ROLE_NAMES_MAX, parse_user);
    let rule =
        "requires manager.listen = \"unix:/path\"; clients of an IP address use tokens or certificates";
    let allowed = ["group", "schedulers", "admins"]
        .map(|key| section.check(is_unix != Some(false) || !section.contains(key), key, rule));
    let names_users = |list: &Option<Vec<u32>>| list.as_ref().is_some_and(|users| !users.is_empty());
    let needs_group = is_unix == Some(true) && (names_users(&schedulers) || names_users(&admins));
    let reachable = section.check(
        !needs_group || section.contains("group"),
        "group",
        "is missing: without it only root and the manager's user can connect",
    );
    section.reject_unknown_keys();
    allowed.into_iter().collect::<Option<()>>()?;
    reachable?;
    let (group, schedulers, admins) = (group?, schedulers?, admins?);
    Some(Access { group, schedulers: schedulers.into_iter().collect(), admins: admins.into_iter().collect() })
}

fn parse_user(field: &Field<'_>) -> Result<u32, String> {
    parse_id(field, "user", |name| Ok(User::from_name(name)?.map(|user| user.uid.as_raw())))
}

fn parse_group(field: &Field<'_>) -> Result<u32, String> {
    parse_id(field, "group", |name| Ok(Group::from_name(name)?.map(|group| group.gid.as_raw())))
}

/// Parses the ID of a user or group: a number, with or without quotes, or a name. `kind` is "user"
/// or "group", and `find` returns the ID of a name, or `None` if the name is unknown.
fn parse_id(
    field: &Field<'_>,
    kind: &str,
    find: impl FnOnce(&str) -> nix::Result<Option<u32>>,
) -> Result<u32, String> {
    let rule = || format!("must be a name in quotes, or a number from 0 to {ID_MAX}");
    if field.is_integer() {
        return field.to_integer(0..=ID_MAX).map_err(|_| rule());
    }
    let name = field.as_str().map_err(|_| rule())?;
    if name.trim_start_matches('-').bytes().all(|digit| digit.is_ascii_digit()) {
        return name.parse().ok().filter(|id| *id <= ID_MAX).ok_or_else(rule);
    }
    let found = find(name).map_err(|errno| format!("cannot look up the {kind}: {errno}"))?;
    found.ok_or_else(|| format!("no such {kind} on this machine; {}", rule()))
}
