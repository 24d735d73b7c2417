//! Rule against import cycles between modules with the same parent. Without cycles, each module can
//! be read, tested and replaced separately. A module and its child modules may import each other.
//! Tests are exempt.

use std::collections::{BTreeMap, BTreeSet};

use super::{Violation, sources::Sources};

/// Path of a module, relative to the root of its crate. The path of the root is empty.
type ModulePath<'a> = Vec<&'a str>;

/// Import between two modules with the same parent, or between their descendants.
struct Import<'a> {
    path: &'a str,
    line: usize,
    /// Folder of the crate, and path of the parent of both modules.
    parent: (&'a str, ModulePath<'a>),
    from: &'a str,
    to: String,
}

/// Reports each import that is part of a cycle.
pub fn check_cycles(sources: &Sources) -> Vec<Violation> {
    let imports = sibling_imports(sources);
    let mut graphs: BTreeMap<_, BTreeMap<&str, BTreeSet<&str>>> = BTreeMap::new();
    for import in &imports {
        graphs.entry(&import.parent).or_default().entry(import.from).or_default().insert(&import.to);
    }
    let cyclic = imports.iter().filter(|import| has_path(&graphs[&import.parent], &import.to, import.from));
    let violation = |import: &Import<'_>| Violation {
        path: import.path.to_owned(),
        line: import.line,
        message: format!("{} imports {}, which imports {0} directly or indirectly", import.from, import.to),
        fix: "move the code that both modules need to a third module, or pass a value as an argument",
    };
    cyclic.map(violation).collect::<BTreeSet<_>>().into_iter().collect()
}

fn sibling_imports(sources: &Sources) -> Vec<Import<'_>> {
    let files = sources.non_test_files().filter_map(|file| Some((file, module_of(&file.path)?)));
    let files: Vec<_> = files.collect();
    let modules: BTreeSet<_> = files.iter().map(|(_, module)| module.clone()).collect();
    let mut imports = Vec::new();
    for (file, (package, module)) in &files {
        for (line, path) in file.paths() {
            let Some(mut target) = resolve_import(module, &path) else { continue };
            while !target.is_empty() && !modules.contains(&(*package, target.clone())) {
                target.pop();
            }
            let common = module.iter().zip(&target).take_while(|(a, b)| a == b).count();
            if let (Some(from), Some(to)) = (module.get(common), target.get(common)) {
                let parent = (*package, module[..common].to_vec());
                imports.push(Import { path: &file.path, line, parent, from, to: (*to).to_owned() });
            }
        }
    }
    imports
}

/// Returns the folder of the crate and the path of the module for a file. Returns `None` for a file
/// outside of `src`. A program with a folder in `src/bin` is a crate of its own.
fn module_of(path: &str) -> Option<(&str, ModulePath<'_>)> {
    let (mut package, mut file) = path.split_once("/src/")?;
    if let Some((_, inner)) = file.strip_prefix("bin/").and_then(|file| file.split_once('/')) {
        (package, file) = (path.strip_suffix(inner)?, inner);
    }
    let mut module: ModulePath<'_> = file.strip_suffix(".rs")?.split('/').collect();
    if matches!(module.last(), Some(&("mod" | "lib" | "main"))) {
        module.pop();
    }
    Some((package, module))
}

/// Resolves an import of `module` to a path from the root of the crate. Returns `None` for an
/// import of another crate or of a child module.
fn resolve_import<'a>(module: &[&'a str], path: &'a str) -> Option<ModulePath<'a>> {
    let mut segments = path.split("::").peekable();
    let mut target = match *segments.peek()? {
        "crate" => Vec::new(),
        "self" | "super" => module.to_vec(),
        _ => return None,
    };
    for segment in segments {
        match segment {
            "crate" | "self" => {}
            "super" => drop(target.pop()),
            name => target.push(name),
        }
    }
    Some(target)
}

/// Returns whether imports lead from `start` to `end`, directly or indirectly.
fn has_path(graph: &BTreeMap<&str, BTreeSet<&str>>, start: &str, end: &str) -> bool {
    let mut seen = BTreeSet::from([start]);
    let mut open = vec![start];
    while let Some(module) = open.pop() {
        if module == end {
            return true;
        }
        open.extend(graph.get(module).into_iter().flatten().copied().filter(|next| seen.insert(next)));
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::sources::{locations, sources};

    fn cycles(files: &[(&str, &str)]) -> Vec<String> {
        locations(&check_cycles(&sources(files)))
    }

    #[test]
    fn imports_in_one_direction_are_accepted() {
        let files =
            [("x/src/a.rs", "use crate::b::B;\n"), ("x/src/b.rs", "use crate::c::C;\n"), ("x/src/c.rs", "")];
        assert_eq!(cycles(&files), [""; 0]);
    }

    #[test]
    fn cycle_of_three_modules_is_reported_at_each_import() {
        let files = [
            ("x/src/a.rs", "use std::fs;\nuse crate::b::B;\n"),
            ("x/src/b.rs", "fn f() { super::c::g() }\n"),
            ("x/src/c.rs", "use crate::{a::A, d::D};\n"),
            ("x/src/d.rs", ""),
        ];
        assert_eq!(cycles(&files), ["x/src/a.rs:2", "x/src/b.rs:1", "x/src/c.rs:1"]);
    }

    #[test]
    fn imports_of_child_modules_count_for_their_parent() {
        let files = [
            ("x/src/a.rs", ""),
            ("x/src/a/deep.rs", "use crate::b::B;\n"),
            ("x/src/b.rs", ""),
            ("x/src/b/deep.rs", "use crate::a::A;\n"),
        ];
        assert_eq!(cycles(&files), ["x/src/a/deep.rs:1", "x/src/b/deep.rs:1"]);
    }

    #[test]
    fn program_in_a_folder_is_a_crate_of_its_own() {
        let files = [
            ("x/src/a.rs", ""),
            ("x/src/bin/p/main.rs", ""),
            ("x/src/bin/p/a.rs", "use crate::b::B;\n"),
            ("x/src/bin/p/b.rs", "use crate::a::A;\n"),
        ];
        assert_eq!(cycles(&files), ["x/src/bin/p/a.rs:1", "x/src/bin/p/b.rs:1"]);
    }

    #[test]
    fn child_modules_tests_and_other_crates_are_exempt() {
        let files = [
            ("x/src/a.rs", "use self::deep::D;\n#[cfg(test)]\nmod tests { use crate::b::B; }\n"),
            ("x/src/a/deep.rs", "use super::A;\n"),
            ("x/src/b.rs", "use crate::a::A;\n"),
            ("y/src/a.rs", "use crate::b::B;\n"),
            ("y/src/b.rs", ""),
        ];
        assert_eq!(cycles(&files), [""; 0]);
    }
}
