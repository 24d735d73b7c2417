//! Only one user and root can access the memory of a VM, and a process belongs to one VM.

use super::*;

/// Script after which VM a of user 2001 and VM b without a user are ready.
const READY_SCRIPT: &str = "up desired:1:a/2001=1.1:b=2.1 ok:1.1 ok:2.1";

fn check_ready_vms(more: &str, expected: &str) {
    check(&format!("{READY_SCRIPT} {more}"), expected);
}

#[test]
fn vm_of_a_user_is_attached_only_by_that_user_and_root() {
    check_ready_vms("attach:a@100/2001", "record:a");
    check_ready_vms("attach:a@100/0", "record:a");
    check_ready_vms(
        "attach:a@100/2002",
        "refuse:1:VM a belongs to user 2001: the caller must be user 2001 or root, not user 2002",
    );
}

#[test]
fn vm_without_a_user_belongs_to_the_agents_user_and_root() {
    let refused = "refuse:1:VM b belongs to user 0: the caller must be user 0 or root, not user 2001; its reservation has no user";
    check_ready_vms("attach:b@100/2001", refused);
    let attach = |uid| {
        let (mut agent, _) = run(Vec::new(), "", READY_SCRIPT);
        agent.set_default_user(user_id(990));
        let caller = Caller { process: process(100), uid: user_id(uid), control_socket: None };
        agent.handle(Ns::secs(1), Event::Attach { ticket: Ticket(1), vm: Name::new("b").unwrap(), caller });
        std::iter::from_fn(|| agent.poll_effect()).any(|effect| matches!(effect, Effect::Record(_)))
    };
    assert_eq!([990, 0, 2001].map(attach), [true, true, false]);
}

#[test]
fn preview_is_limited_to_the_users_of_the_memory() {
    let (agent, _) = run(Vec::new(), "", READY_SCRIPT);
    let preview = |vm: &str, uid| {
        let caller = Caller { process: process(100), uid: user_id(uid), control_socket: None };
        agent.preview(&Name::new(vm).unwrap(), caller).map(|record| record.uid)
    };
    assert_eq!(preview("a", 2001), Ok(Some(user_id(2001))));
    assert_eq!(preview("a", 0), Ok(Some(user_id(2001))));
    assert_eq!(preview("b", 0), Ok(None));
    for (vm, uid) in [("a", 2002), ("b", 2001)] {
        assert!(matches!(preview(vm, uid), Err(Refusal::OtherUser { .. })), "{vm} by {uid}");
    }
}

#[test]
fn process_of_a_running_vm_is_not_shown_to_other_users() {
    check_ready_vms(
        "attach:a@100/2001 recorded:a attach:a@200/2002",
        "refuse:2:VM a belongs to user 2001: the caller must be user 2001 or root, not user 2002",
    );
    check_ready_vms(
        "attach:a@100/2001 recorded:a attach:a@200/2001",
        "refuse:2:VM a is attached to process 100, which still runs",
    );
}

/// After a restart of the agent, a VMM that dropped root privileges may attach again under another
/// user.
#[test]
fn vm_process_may_attach_again_as_another_user() {
    check_ready_vms("attach:a@100/0 recorded:a attach:a@100/2002", "pass:2=1.1");
}

#[test]
fn process_of_a_vm_cannot_attach_another_vm() {
    let refused = "process 100 is attached to VM a (r-1): VM b requires another process";
    check_ready_vms("attach:a@100 attach:b@100", &format!("refuse:2:{refused}"));
    check_ready_vms("attach:a@100 recorded:a attach:b@100", &format!("refuse:2:{refused}"));
    check_ready_vms("attach:a@100 recorded:a gone:a attach:b@100", "record:b");
    let restarted = vec![recovered_vm("a", "1.1", true)];
    check_recovered_vms(restarted, "up desired:1:b=2.1 ok:2.1 attach:b@100", &format!("refuse:1:{refused}"));
    let (agent, _) = run(Vec::new(), "", &format!("{READY_SCRIPT} attach:a@100 recorded:a"));
    let preview = agent.preview(&Name::new("b").unwrap(), root_caller(100));
    assert_eq!(preview.map_err(|why| why.to_string()), Err(refused.to_owned()));
}

#[test]
fn reports_name_the_user_of_a_vm_after_a_restart() {
    let users = |agent: &Agent| agent.observed_state().vms.values().map(|vm| vm.uid).collect::<Vec<_>>();
    let (agent, _) = run(Vec::new(), "", &format!("{READY_SCRIPT} attach:a@100 recorded:a"));
    assert_eq!(users(&agent), [Some(user_id(2001))]);
    let mut recovered = recovered_vm("a", "1.1", true);
    recovered.record.uid = Some(user_id(2001));
    assert_eq!(users(&run(vec![recovered], "", "up").0), [Some(user_id(2001))]);
}
