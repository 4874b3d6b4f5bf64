// The attribute of what a shared libsherd exports; everything else is hidden.
#pragma once

// A macro because the attribute has to stand in places where [[...]] may not (friends, static members).
#define SHERD_API __attribute__((visibility("default")))
