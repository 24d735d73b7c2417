//! Syntax tree of one Rust file, with queries for the rules: paths, functions, attributes,
//! identifiers and constants.

use std::collections::BTreeSet;

use proc_macro2::{TokenStream, TokenTree};
use syn::{
    Attribute, Block, Expr, ExprLit, ExprMethodCall, ImplItemFn, Item, ItemFn, ItemMod, Lit, Meta, Signature,
    TraitItemFn, UseRename, UseTree,
    spanned::Spanned,
    visit::{self, Visit},
};

use crate::failure::Failure;

/// Parsed Rust file.
pub struct RustFile {
    /// Path, relative to the root of the repository.
    pub path: String,
    /// Complete text of the file.
    pub text: String,
    /// Whether the file is compiled only for tests.
    pub is_test: bool,
    tree: syn::File,
}

/// Line number, from 1, and a value from this line.
pub type WithLine<T> = (usize, T);

impl RustFile {
    /// Parses the text of a file.
    ///
    /// # Errors
    /// Returns an error if the text is not valid Rust.
    pub fn parse(path: &str, text: &str) -> Result<Self, Failure> {
        let tree = syn::parse_file(text)
            .map_err(|error| Failure::BadResult(format!("{path}:{}: {error}", error.span().start().line)))?;
        // All files of integration tests and of the package `tests` are test code.
        let is_test = path.starts_with("tests/") || path.contains("/tests/");
        Ok(Self { path: path.to_owned(), text: text.to_owned(), is_test, tree })
    }

    /// Returns all paths outside of tests. Grouped imports are expanded: `use std::{fs, io::Read}`
    /// is returned as `std::fs` and `std::io::Read`.
    pub fn paths(&self) -> Vec<WithLine<String>> {
        let mut visitor = PathVisitor::default();
        visitor.visit_file(&self.tree);
        visitor.0
    }

    /// Returns all functions outside of tests: first line, name, and number of lines from `fn` to
    /// the closing brace.
    pub fn functions(&self) -> Vec<WithLine<(String, usize)>> {
        let mut visitor = FunctionVisitor::default();
        visitor.visit_file(&self.tree);
        visitor.0
    }

    /// Returns all attributes, including those of tests, without spaces: `ignore`, `cfg(test)`.
    pub fn attributes(&self) -> Vec<WithLine<String>> {
        let mut visitor = AttributeVisitor::default();
        visitor.visit_file(&self.tree);
        visitor.0
    }

    /// Returns all identifiers, including those in tests and macros. Comments and strings are
    /// skipped.
    pub fn identifiers(&self) -> Vec<WithLine<String>> {
        let mut idents = Vec::new();
        let tokens = self.text.parse::<TokenStream>().expect("a parsed file consists of tokens");
        collect_identifiers(tokens, &mut idents);
        idents
    }

    /// Returns the names and lines of all top-level constants.
    pub fn constants(&self) -> Vec<WithLine<String>> {
        let constants = self.tree.items.iter().filter_map(|item| match item {
            Item::Const(constant) => Some((constant.ident.span().start().line, constant.ident.to_string())),
            _ => None,
        });
        constants.filter(|(_, name)| name != "_").collect()
    }

    /// Returns the string literals that are passed as the first argument of these methods, outside
    /// of tests.
    pub fn first_string_arguments(&self, methods: &[&str]) -> Vec<WithLine<String>> {
        let mut visitor = CallVisitor { methods, texts: Vec::new() };
        visitor.visit_file(&self.tree);
        visitor.texts
    }

    /// Returns the number of lines outside of tests.
    pub fn count_non_test_lines(&self) -> usize {
        let tests = self.tree.items.iter().filter(|item| is_test(attributes_of(item)));
        self.text.lines().count().saturating_sub(tests.map(|item| span_line_count(item.span())).sum())
    }

    /// Returns the names of test modules that this file declares and that have their own file.
    fn test_modules(&self) -> Vec<String> {
        let declared = self.tree.items.iter().filter_map(|item| match item {
            Item::Mod(module) if module.content.is_none() && is_test(&module.attrs) => Some(module),
            _ => None,
        });
        declared.map(|module| module.ident.to_string()).collect()
    }

    /// Returns the folder of the modules that this file declares. For `lib.rs`, `main.rs` and
    /// `mod.rs`, this is the folder of the file; otherwise, a folder with the name of the file.
    fn folder(&self) -> String {
        let (folder, name) = self.path.rsplit_once('/').unwrap_or(("", &self.path));
        match name {
            "lib.rs" | "main.rs" | "mod.rs" => folder.to_owned(),
            _ => self.path.trim_end_matches(".rs").to_owned(),
        }
    }
}

/// Marks files of modules declared as `#[cfg(test)] mod name;`, and their child modules, as test
/// code.
pub fn mark_test_modules(files: &mut [RustFile]) {
    let declared = files.iter().flat_map(|file| {
        let folder = file.folder();
        file.test_modules().into_iter().map(move |name| format!("{folder}/{name}"))
    });
    let declared: Vec<String> = declared.collect();
    for file in files {
        let path = file.path.trim_end_matches(".rs");
        file.is_test |=
            declared.iter().any(|module| path == module || path.starts_with(&format!("{module}/")));
    }
}

fn span_line_count(span: proc_macro2::Span) -> usize {
    span.end().line + 1 - span.start().line
}

fn is_test(attributes: &[Attribute]) -> bool {
    attributes
        .iter()
        .any(|attribute| matches!(attribute_text(attribute).as_str(), "cfg(test)" | "test" | "tokio::test"))
}

/// Returns the text of an attribute without spaces and values: `ignore`, `cfg(test)`,
/// `tokio::test`.
fn attribute_text(attribute: &Attribute) -> String {
    let path = |path: &syn::Path| {
        path.segments.iter().map(|segment| segment.ident.to_string()).collect::<Vec<_>>().join("::")
    };
    match &attribute.meta {
        Meta::Path(name) => path(name),
        Meta::List(list) => format!("{}({})", path(&list.path), list.tokens.to_string().replace(' ', "")),
        Meta::NameValue(pair) => path(&pair.path),
    }
}

fn attributes_of(item: &Item) -> &[Attribute] {
    match item {
        Item::Fn(ItemFn { attrs, .. }) | Item::Mod(ItemMod { attrs, .. }) => attrs,
        Item::Impl(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

fn collect_identifiers(tokens: TokenStream, idents: &mut Vec<WithLine<String>>) {
    for token in tokens {
        match token {
            TokenTree::Group(group) => collect_identifiers(group.stream(), idents),
            TokenTree::Ident(ident) => idents.push((ident.span().start().line, ident.to_string())),
            TokenTree::Punct(_) | TokenTree::Literal(_) => {}
        }
    }
}

/// Implements `visit_item` of a visitor so that test code is skipped.
macro_rules! skip_tests {
    () => {
        fn visit_item(&mut self, item: &'ast Item) {
            if !is_test(attributes_of(item)) {
                visit::visit_item(self, item);
            }
        }
    };
}

#[derive(Default)]
struct PathVisitor(Vec<WithLine<String>>);

impl<'ast> Visit<'ast> for PathVisitor {
    skip_tests!();

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        expand_imports(String::new(), &item.tree, &mut self.0);
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let segments: Vec<String> = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
        self.0.push((path.span().start().line, segments.join("::")));
        visit::visit_path(self, path);
    }
}

fn expand_imports(prefix: String, tree: &UseTree, paths: &mut Vec<WithLine<String>>) {
    let joined = |name: String| if prefix.is_empty() { name } else { format!("{prefix}::{name}") };
    match tree {
        UseTree::Path(step) => expand_imports(joined(step.ident.to_string()), &step.tree, paths),
        UseTree::Group(group) => {
            group.items.iter().for_each(|item| expand_imports(prefix.clone(), item, paths))
        }
        UseTree::Glob(glob) => paths.push((glob.span().start().line, joined("*".to_owned()))),
        UseTree::Rename(UseRename { ident, .. }) => {
            paths.push((ident.span().start().line, joined(ident.to_string())))
        }
        UseTree::Name(name) => paths.push((name.span().start().line, joined(name.ident.to_string()))),
    }
}

#[derive(Default)]
struct FunctionVisitor(Vec<WithLine<(String, usize)>>);

impl FunctionVisitor {
    fn add(&mut self, signature: &Signature, body: &Block) {
        let from = signature.fn_token.span().start().line;
        let to = body.brace_token.span.close().end().line;
        self.0.push((from, (signature.ident.to_string(), to + 1 - from)));
    }
}

impl<'ast> Visit<'ast> for FunctionVisitor {
    skip_tests!();

    fn visit_item_fn(&mut self, function: &'ast ItemFn) {
        self.add(&function.sig, &function.block);
        visit::visit_item_fn(self, function);
    }

    fn visit_impl_item_fn(&mut self, function: &'ast ImplItemFn) {
        self.add(&function.sig, &function.block);
        visit::visit_impl_item_fn(self, function);
    }

    fn visit_trait_item_fn(&mut self, function: &'ast TraitItemFn) {
        function.default.iter().for_each(|body| self.add(&function.sig, body));
        visit::visit_trait_item_fn(self, function);
    }
}

struct CallVisitor<'a> {
    methods: &'a [&'a str],
    texts: Vec<WithLine<String>>,
}

impl<'ast> Visit<'ast> for CallVisitor<'_> {
    skip_tests!();

    fn visit_expr_method_call(&mut self, call: &'ast ExprMethodCall) {
        let is_method = self.methods.iter().any(|method| call.method == method);
        if let (true, Some(Expr::Lit(ExprLit { lit: Lit::Str(text), .. }))) = (is_method, call.args.first()) {
            self.texts.push((text.span().start().line, text.value()));
        }
        visit::visit_expr_method_call(self, call);
    }
}

#[derive(Default)]
struct AttributeVisitor(Vec<WithLine<String>>);

impl<'ast> Visit<'ast> for AttributeVisitor {
    fn visit_attribute(&mut self, attribute: &'ast Attribute) {
        self.0.push((attribute.span().start().line, attribute_text(attribute)));
    }
}

/// Returns the identifiers of all files except those with excluded paths, for rules about unused items.
pub fn identifiers_outside(files: &[RustFile], is_excluded: impl Fn(&str) -> bool) -> BTreeSet<String> {
    let others = files.iter().filter(|file| !is_excluded(&file.path));
    others.flat_map(|file| file.identifiers().into_iter().map(|(_, ident)| ident)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_file(text: &str) -> RustFile {
        RustFile::parse("crates/a/src/b.rs", text).unwrap()
    }

    #[test]
    fn grouped_imports_are_expanded() {
        let paths = parse_file("use std::{fs, io::{self, Read}};\nuse a::*;").paths();
        let expected = [(1, "std::fs"), (1, "std::io::self"), (1, "std::io::Read"), (2, "a::*")];
        assert_eq!(paths, expected.map(|(line, path)| (line, path.to_owned())));
    }

    #[test]
    fn test_code_is_skipped() {
        let file = parse_file("fn a() {}\n#[cfg(test)]\nmod tests {\n    use std::fs;\n    fn b() {}\n}\n");
        assert_eq!(file.paths(), []);
        assert_eq!(file.functions(), [(1, ("a".to_owned(), 1))]);
        assert_eq!(file.count_non_test_lines(), 1);
    }

    #[test]
    fn comments_and_strings_have_no_identifiers() {
        let idents = parse_file("// LIMIT\nfn a() { b(\"LIMIT\"); }").identifiers();
        assert!(!idents.iter().any(|(_, ident)| ident == "LIMIT"), "{idents:?}");
    }

    #[test]
    fn files_of_test_modules_are_test_code() {
        let parse = |path, text| RustFile::parse(path, text).unwrap();
        let mut files = [
            parse("crates/a/src/ledger.rs", "#[cfg(test)]\nmod tests;\nmod life;"),
            parse("crates/a/src/ledger/tests.rs", ""),
            parse("crates/a/src/ledger/tests/epochs.rs", ""),
            parse("crates/a/src/ledger/life.rs", ""),
        ];
        mark_test_modules(&mut files);
        assert_eq!(files.map(|file| file.is_test), [false, true, true, false]);
    }

    #[test]
    fn syntax_error_contains_path_and_line() {
        let error = RustFile::parse("a.rs", "fn a() {}\nfn fn").err().unwrap();
        assert!(error.to_string().starts_with("a.rs:2: "), "{error}");
    }
}
