//! Rules that apply to the tenants of all reports of agents.

use std::collections::BTreeSet;

use units::{
    Name,
    limits::{TENANTS_PER_HOST_MAX, TIERING_TEXT_BYTES_MAX},
};

use super::requests::{InvalidField, parse_name};

/// Rule for a tenant that appears again.
pub const DUPLICATE_TENANT: &str = "is a duplicate: each tenant must appear once";

/// Checks the tenants of a report: their number, their names, and the other fields by `check_tenant`.
/// `list` and `name` are the fields with all tenants, and with the name of a tenant.
///
/// # Errors
/// [`InvalidField`] with the first field that violates a rule.
pub fn check_tenants<T>(
    [list, name]: [&'static str; 2],
    tenants: &[T],
    name_of: impl Fn(&T) -> &str,
    check_tenant: impl Fn(&T) -> Result<(), InvalidField>,
) -> Result<(), InvalidField> {
    check_tenant_count(list, tenants.len())?;
    let mut names = BTreeSet::new();
    for tenant in tenants {
        let tenant_name = parse_name(name, name_of(tenant))?;
        check_tenant(tenant).map_err(add_tenant_name(&tenant_name))?;
        if !names.insert(tenant_name) {
            return Err(InvalidField::new(name, format!("{:?}", name_of(tenant)), DUPLICATE_TENANT));
        }
    }
    Ok(())
}

/// Checks the number of tenants.
///
/// # Errors
/// [`InvalidField`] if it exceeds [`TENANTS_PER_HOST_MAX`].
pub fn check_tenant_count(field: &'static str, count: usize) -> Result<(), InvalidField> {
    let rule = || format!("must be at most {TENANTS_PER_HOST_MAX}");
    if count <= TENANTS_PER_HOST_MAX { Ok(()) } else { Err(InvalidField::new(field, count, rule())) }
}

/// Adds the tenant's name to an error message.
pub fn add_tenant_name(tenant: &Name) -> impl FnOnce(InvalidField) -> InvalidField {
    move |InvalidField { field, problem }| InvalidField { field, problem: format!("{problem} (of {tenant})") }
}

/// Checks the size of a text in a report of fair tiering or early eviction.
///
/// # Errors
/// [`InvalidField`] if it exceeds [`TIERING_TEXT_BYTES_MAX`].
pub fn check_text(field: &'static str, text: &str) -> Result<(), InvalidField> {
    check_text_size(field, text, TIERING_TEXT_BYTES_MAX)
}

/// Checks the size of a text.
///
/// # Errors
/// [`InvalidField`] if it exceeds `bytes_max`.
pub fn check_text_size(field: &'static str, text: &str, bytes_max: usize) -> Result<(), InvalidField> {
    if text.len() <= bytes_max {
        return Ok(());
    }
    let rule = format!("must have at most {bytes_max} bytes");
    Err(InvalidField::new(field, format!("{} bytes", text.len()), rule))
}
